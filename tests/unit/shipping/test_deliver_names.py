"""Unusual file names arrive."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.shipping.deliver import build_receiver
from csdctl.shipping.payload import TreeRequest, pack_payload, read_tree
from tests.unit.shipping.delivering import Machine, send_tree
from tests.unit.transport.names import NASTY_NAMES

pytestmark = pytest.mark.first(10)


class TestNames:
    @pytest.mark.fault(30)
    @pytest.mark.parametrize("name", [*NASTY_NAMES, os.fsdecode(b"not utf-8 \xff\xfe")])
    def test_any_name_arrives(self, machine: Machine, host: Path, name: str) -> None:
        session, home = machine
        (host / name / name).mkdir(parents=True)
        (host / name / name / name).write_bytes(b"content\0\xff")
        (host / name / "link").symlink_to(name)
        send_tree(session, host / name, f"deep/{name}")
        assert (home / "deep" / name / name / name).read_bytes() == b"content\0\xff"
        assert os.readlink(home / "deep" / name / "link") == name
        assert not list(home.rglob("pwned"))

    @pytest.mark.fault(30)
    def test_names_survive_a_node_with_another_encoding(self, source: Path, tmp_path: Path) -> None:
        (source / "ü").write_bytes(b"u")
        (tmp_path / "node").mkdir()
        payload = pack_payload(trees=[read_tree(TreeRequest(source, "thäre"))])
        command, first = build_receiver(sys.executable, {**payload.manifest, "dry_run": True})
        done = subprocess.run(
            command,
            input=first,
            cwd=tmp_path / "node",
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            capture_output=True,
            check=True,
        )
        assert b'"ranges": [[0, 2]]' in done.stdout


@pytest.mark.parametrize("destination", [".csdctl", "./.csdctl/objects"])
def test_tree_is_not_put_into_the_store(node: Machine, source: Path, destination: str) -> None:
    with pytest.raises(InputError, match="csdctl's own directory"):
        send_tree(node[0], source, destination)
    assert not list(node[1].rglob("*"))
