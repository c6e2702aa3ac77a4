"""`exec` of a command: what is folded, bounded and counted as failed, over a real SSH server."""

from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, DeadlineError, NoNodeReachableError, PartialError
from csdctl.fleet.model import Fleet
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.exec.run_command import MAX_KEPT_BYTES, ExecOptions, ExecResult, run_command
from csdctl.workflows.workspace.workspace import conclude
from tests.unit.transport.conftest import SshServer


@pytest.fixture
def fleet(module_server: SshServer, tmp_path: Path) -> Fleet:
    module_server.trust_in(tmp_path)
    nodes = tuple(module_server.node(name=f"csd{number}") for number in range(3))
    return Fleet(nodes, path=tmp_path / "fleet.yaml")


def run(fleet: Fleet, *command: str, **options: float | bool) -> ExecResult:
    directory = fleet.path.parent
    return run_command(fleet, command, directory=directory, options=ExecOptions(**options))  # type: ignore[arg-type]


def error_of(result: ExecResult) -> type[CsdctlError] | None:
    """Return the type of the error that ends the command, and thereby its exit code."""
    project = ProjectDirectory(result.fleet.path.parent)
    try:
        conclude(project, "exec", list(result.outcomes), result.failed, "csdctl exec -- x")
    except CsdctlError as error:
        return type(error) if error.remedy.endswith("retry only them: csdctl exec -- x") else None
    return None


def test_equal_answers_are_one_row_in_the_order_of_the_nodes(fleet: Fleet) -> None:
    result = run(fleet, "printf", "%s\\n", "two words", "$HOME;`id`")
    assert [(answer.stdout, names) for answer, names in result.rows] == [
        (b"two words\n$HOME;`id`\n", ["csd0", "csd1", "csd2"])
    ]
    assert error_of(result) is None


def test_one_argument_is_a_line_for_the_shell_and_outputs_stay_apart(fleet: Fleet) -> None:
    result = run(fleet, "echo out | tr a-z A-Z; echo err >&2; umask; exit 7")
    ((answer, names),) = result.rows
    assert (answer.exit_code, answer.stderr) == (7, b"err\n")
    assert answer.stdout.startswith(b"OUT\n0")
    assert answer.stdout != b"OUT\n0077\n"  # files get the permissions of a login
    assert len(names) == 3
    assert "exit code 7: err" in result.failed["csd1"].message
    assert error_of(result) is CsdctlError


def test_deadline_of_every_node_is_the_deadline_exit_code(fleet: Fleet) -> None:
    result = run(fleet, "sleep", "60", timeout_s=0.3)
    assert all(isinstance(outcome.error, DeadlineError) for outcome in result.outcomes.values())
    assert error_of(result) is DeadlineError


def test_host_and_nodes_that_cannot_be_reached(fleet: Fleet) -> None:
    off = replace(fleet, nodes=tuple(replace(node, port=1) for node in fleet.nodes))
    assert error_of(run(off, "true")) is NoNodeReachableError
    assert error_of(run(off, "true", has_host=True)) is NoNodeReachableError
    some = replace(fleet, nodes=(*fleet.nodes, replace(fleet.nodes[0], name="off", port=1)))
    result = run(some, "true", has_host=True)
    assert list(result.answers) == ["host", "csd0", "csd1", "csd2"]
    assert list(result.failed) == ["off"]
    assert error_of(result) is PartialError


def test_output_is_bounded(fleet: Fleet) -> None:
    ((answer, _),) = run(fleet, "head -c 3000000 /dev/zero | tr '\\0' x").rows
    assert len(answer.stdout) == MAX_KEPT_BYTES
    assert answer.num_dropped > 0
