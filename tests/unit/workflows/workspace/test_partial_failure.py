"""The end of a command on many nodes: its exit code, and what it saves for `--failed-from`."""

from pathlib import Path

import pytest

from csdctl.errors import (
    CsdctlError,
    DeadlineError,
    ExitCode,
    HostKeyError,
    InputError,
    JumpHostError,
    RemoteCommandError,
    UnreachableError,
)
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.workspace.partial_failure import choose_fleet, conclude, load_failed

MACHINES = ["host", "csd0", "csd1"]
DOWN = UnreachableError("does not answer", remedy="check it")
FLEET = "nodes: [{name: 'csd[0-3]', address: '10.0.0.[1-4]'}]"


def code_of(tmp_path: Path, failed: dict[str, CsdctlError]) -> ExitCode:
    with pytest.raises(CsdctlError) as caught:
        conclude(ProjectDirectory(tmp_path), "clean", MACHINES, failed)
    assert "csdctl clean --failed-from .csdctl/failed.json" in caught.value.remedy
    return caught.value.exit_code


def test_some_nodes_failed_is_partial(tmp_path: Path) -> None:
    assert code_of(tmp_path, {"csd1": DOWN}) == ExitCode.PARTIAL


@pytest.mark.parametrize("error", [DOWN, HostKeyError("changed"), JumpHostError("gate is down")])
def test_no_reachable_node_has_its_own_exit_code(tmp_path: Path, error: CsdctlError) -> None:
    assert code_of(tmp_path, {"csd0": DOWN, "csd1": error}) == ExitCode.UNREACHABLE


def test_failure_of_every_machine_is_not_partial(tmp_path: Path) -> None:
    errors = dict.fromkeys(MACHINES, RemoteCommandError("no python3"))
    assert code_of(tmp_path, dict(errors)) == ExitCode.FAILED


def test_nodes_that_failed_for_different_reasons_are_not_all_unreachable(tmp_path: Path) -> None:
    assert code_of(tmp_path, {"csd0": DOWN, "csd1": RemoteCommandError("no python3")}) == ExitCode.PARTIAL


def test_only_machines_that_all_ran_out_of_time_end_with_the_code_for_it(tmp_path: Path) -> None:
    late = DeadlineError("did not finish")
    assert code_of(tmp_path, dict.fromkeys(MACHINES, late)) == ExitCode.DEADLINE
    mixed = {"host": late, "csd0": late, "csd1": RemoteCommandError("no python3")}
    assert code_of(tmp_path, dict(mixed)) == ExitCode.FAILED


def test_failed_nodes_are_saved_until_the_command_succeeds(tmp_path: Path) -> None:
    code_of(tmp_path, {"host": DOWN, "csd1": DOWN})
    project = ProjectDirectory(tmp_path)
    assert load_failed(project.failed) == "csd1", "the host always takes part"
    conclude(project, "clean", MACHINES, {})
    assert not project.failed.exists()


def test_failed_from_and_other_selections_combine(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "failed.json").write_text('{"failed": {"csd1": {}, "csd2": {}}}')
    path = tmp_path / "fleet.yaml"
    fleet = choose_fleet(path, failed_from=tmp_path / "failed.json")
    assert [node.name for node in fleet.nodes] == ["csd1", "csd2"]
    fleet = choose_fleet(path, exclude=["csd1"], failed_from=tmp_path / "failed.json")
    assert [node.name for node in fleet.nodes] == ["csd2"]


@pytest.mark.fault(36)
def test_failed_from_of_another_fleet_or_truncated_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    for content in ('{"failed": {"other": {}}}', '{"failed": {"cs'):
        (tmp_path / "failed.json").write_text(content)
        with pytest.raises(InputError):
            choose_fleet(tmp_path / "fleet.yaml", failed_from=tmp_path / "failed.json")
