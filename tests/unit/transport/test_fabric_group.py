"""Fabric over csdctl's connections, against a real SSH server: results, deadlines, bounds, host keys."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fabric
import pytest
from fabric.exceptions import GroupException
from fabric.group import GroupResult
from invoke.exceptions import CommandTimedOut, UnexpectedExit

from csdctl.errors import HostKeyError, InputError
from csdctl.fleet.model import Fleet
from csdctl.transport.fabric_group import FleetGroup, open_group
from csdctl.transport.session import MAX_OUTPUT_BYTES
from tests.patience import eventually, scaled
from tests.unit.transport.test_session_contract import is_alive


@pytest.fixture
def group(server: Any, gate: Any, tmp_path: Any) -> Iterator[FleetGroup]:
    """A node, and a node behind a jump host."""
    server.trust_in(tmp_path)
    gate.trust_in(tmp_path)
    nodes = server.node(), server.node(name="far", jump=gate.node(name="gate"))
    deadlines = {"connect_deadline_s": scaled(10), "command_deadline_s": scaled(30)}
    with open_group(Fleet(nodes, path=tmp_path / "fleet.yaml"), directory=tmp_path, **deadlines) as opened:
        yield opened


def test_group_is_fabrics_and_reaches_nodes_behind_a_jump_host(group: FleetGroup, gate: Any) -> None:
    assert isinstance(group, fabric.ThreadingGroup)
    results = group.run("echo out; echo err >&2; umask", hide=True)
    assert isinstance(results, GroupResult)
    assert {connection.node.name for connection in results} == {"csd0", "far"}
    for result in results.values():
        assert result.stdout.startswith("out\n0")
        assert "0077" not in result.stdout
        assert result.stderr == "err\n"
    assert len(gate.connections) == 1


def test_failures_are_fabrics_and_do_not_hide_results(group: FleetGroup) -> None:
    with pytest.raises(GroupException) as raised:
        group.run("mkdir once 2>/dev/null", hide=True)
    (failed,), (done,) = raised.value.result.failed.values(), raised.value.result.succeeded.values()
    assert isinstance(failed, UnexpectedExit)
    assert done.ok
    assert group[0].run("exit 3", warn=True, hide=True).exited == 3


def test_options_have_their_effect_or_are_refused(
    group: FleetGroup, server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    node = group[0]
    assert node.run("touch dry-run", dry=True).ok
    assert not (server.home / "dry-run").exists()
    assert node.run("echo $A; echo hidden >&2", env={"A": "1"}, hide="stderr", pty=True).stderr == "hidden\n"
    assert capsys.readouterr().out.endswith("\n1\n")
    with pytest.raises(InputError, match="not supported"):
        node.run("touch dry-run", asynchronous=True)


def test_deadline_ends_the_process_on_the_node(group: FleetGroup, server: Any) -> None:
    with pytest.raises(CommandTimedOut):
        group[1].run("echo $$ >pid; exec sleep 600", timeout=scaled(2), hide=True)
    pid = int((server.home / "pid").read_text())
    assert eventually(lambda: not is_alive(pid))


def test_closing_the_group_ends_what_runs(group: FleetGroup, server: Any) -> None:
    with ThreadPoolExecutor() as pool:
        run = pool.submit(group.run, "echo $$ >$$.pid; exec sleep 600", hide=True)
        assert eventually(lambda: len(list(server.home.glob("*.pid"))) == 2)
        group.close()
        assert isinstance(run.exception(), GroupException)
    assert eventually(lambda: not any(is_alive(int(path.stem)) for path in server.home.glob("*.pid")))


def test_output_is_bounded_and_what_stays_in_the_background_goes_on(group: FleetGroup, server: Any) -> None:
    done = group[0].run("sleep 600 >/dev/null 2>&1 & echo $! >pid; head -c 3000000 /dev/zero", hide=True)
    assert MAX_OUTPUT_BYTES < len(done.stdout) < MAX_OUTPUT_BYTES + 100
    assert "the rest was dropped" in done.stdout
    pid = int((server.home / "pid").read_text())
    try:
        assert is_alive(pid)
    finally:
        group[0].run(f"kill {pid}")


def test_changed_host_key_is_refused(
    server: Any, gate: Any, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    server.trust(gate.public_key)
    with pytest.raises(GroupException) as raised:
        request.getfixturevalue("group").run("touch was-here", hide=True)
    assert any("has changed" in error.message for error in raised.value.result.values())
    assert all(isinstance(error, HostKeyError) for error in raised.value.result.values())
    assert not (server.home / "was-here").exists()


def test_sudo_gets_its_password_from_fabrics_configuration(group: FleetGroup, server: Any) -> None:
    (server.home / "bin").mkdir()
    sudo = server.home / "bin" / "sudo"
    sudo.write_text(
        '#!/bin/sh\nprintf "%s" "$3" >&2; read -r secret; shift 3\n'
        '[ "$secret" = s3cret ] || exit 1\nexec "$@"\n'
    )
    sudo.chmod(0o755)
    server.shell_prefix = "PATH=$HOME/bin:$PATH"
    group[0].config.sudo.password = "s3cret"
    assert group[0].sudo("echo as-root", hide=True).stdout == "as-root\n"
