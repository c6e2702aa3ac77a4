"""The programs that start ranks, and the errors when they are missing."""

from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.facts import Facts
from csdctl.launch.tools import check_tools, choose_prefix, find_mpirun, find_ssh, ssh_version


def test_this_environment_has_the_tools() -> None:
    check_tools()
    assert find_mpirun().name == "mpirun"
    assert ssh_version(find_ssh()).startswith("OpenSSH_")


def test_missing_ssh_client_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CsdctlError, match="no ssh client"):
        check_tools()


def test_client_that_is_not_openssh_is_named_by_its_output(tmp_path: Path) -> None:
    other = tmp_path / "ssh"
    other.write_text("#!/bin/sh\necho 'Dropbear v2022.83' >&2\n")
    other.chmod(0o755)
    assert ssh_version(other) == "Dropbear v2022.83"


def test_nodes_share_one_prefix_or_the_error_lists_them() -> None:
    facts = {"csd0": Facts("csd0", prefix="/opt/a"), "csd1": Facts("csd1", prefix="/opt/b")}
    assert choose_prefix(["csd0"], facts) == "/opt/a"
    with pytest.raises(InputError, match="/opt/a, /opt/b"):
        choose_prefix(["csd0", "csd1"], facts)
