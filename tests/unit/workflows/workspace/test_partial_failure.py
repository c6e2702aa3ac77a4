"""The end of a command on many nodes: its exit code, and what it saves for `--failed-from`."""

from pathlib import Path

import pytest

from csdctl import errors
from csdctl.errors import (
    CsdctlError,
    DeadlineError,
    ExitCode,
    HostKeyError,
    InputError,
    JumpHostError,
    PartialError,
)
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.workspace.workspace import choose_fleet, conclude, load_failed

MACHINES = ["host", "csd0", "csd1"]
DOWN = errors.UnreachableError("does not answer", remedy="check it")
NO_PYTHON, LATE = errors.RemoteCommandError("no python3"), DeadlineError("did not finish")
FLEET = "nodes: [{name: 'csd[0-3]', address: '10.0.0.[1-4]'}]"


def code_of(tmp_path: Path, failed: dict[str, CsdctlError]) -> ExitCode:
    with pytest.raises(CsdctlError) as caught:
        conclude(ProjectDirectory(tmp_path), "clean", MACHINES, failed, "csdctl clean again")
    assert "csdctl clean again" in caught.value.remedy
    return caught.value.exit_code


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        ({"csd1": DOWN}, ExitCode.PARTIAL),
        ({"csd0": DOWN, "csd1": DOWN}, ExitCode.UNREACHABLE),
        ({"csd0": DOWN, "csd1": HostKeyError("changed")}, ExitCode.UNREACHABLE),
        ({"csd0": DOWN, "csd1": JumpHostError("gate is down")}, ExitCode.UNREACHABLE),
        ({"csd0": DOWN, "csd1": NO_PYTHON}, ExitCode.PARTIAL),
        (dict.fromkeys(MACHINES, NO_PYTHON), ExitCode.FAILED),
        (dict.fromkeys(MACHINES, LATE), ExitCode.DEADLINE),
        ({"host": LATE, "csd0": LATE, "csd1": NO_PYTHON}, ExitCode.FAILED),
    ],
)
def test_exit_code_follows_from_who_failed_and_why(
    tmp_path: Path, failed: dict[str, CsdctlError], code: ExitCode
) -> None:
    assert code_of(tmp_path, failed) == code


def test_failed_nodes_are_saved_until_the_command_succeeds(tmp_path: Path) -> None:
    code_of(tmp_path, {"host": DOWN, "csd1": DOWN})
    project = ProjectDirectory(tmp_path)
    assert load_failed(project.failed) == "csd1", "the host always takes part"
    for command, machines in (("exec", MACHINES), ("clean", ["host", "csd0"])):
        conclude(project, command, machines, {}, "")
        assert load_failed(project.failed) == "csd1", "neither another command nor another node"
    conclude(project, "clean", ["csd1"], {}, "")
    with pytest.raises(InputError, match="no failed nodes are recorded"):
        load_failed(project.failed)


@pytest.mark.fault(36)
@pytest.mark.parametrize("content", ["", "[]", '{"command": "clean"}', '{"command": "clean", "failed": [1]}'])
def test_damaged_list_of_failed_nodes_is_written_anew(tmp_path: Path, content: str) -> None:
    project = ProjectDirectory(tmp_path)
    project.state.mkdir()
    project.failed.write_text(content)
    conclude(project, "clean", MACHINES, {}, "")
    code_of(tmp_path, {"csd1": DOWN})
    assert load_failed(project.failed) == "csd1"


@pytest.mark.fault(25)
def test_list_that_has_no_place_does_not_hide_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = ProjectDirectory(tmp_path)
    project.failed.mkdir(parents=True)
    with pytest.raises(PartialError, match="clean failed on 1 of 3 machines: csd1"):
        conclude(project, "clean", MACHINES, {"csd1": DOWN}, "csdctl clean again")
    problem = f"where clean failed is not recorded: cannot access {project.failed}: is a directory"
    assert capsys.readouterr().err == f"warning: {problem}\n"


@pytest.mark.fault(36)
def test_failed_from_combines_with_other_selections_and_must_fit_the_fleet(tmp_path: Path) -> None:
    path, failed_from = tmp_path / "fleet.yaml", tmp_path / "failed.json"
    path.write_text(FLEET)
    failed_from.write_text('{"failed": {"csd1": {}, "csd2": {}}}')
    assert [node.name for node in choose_fleet(path, failed_from=failed_from).nodes] == ["csd1", "csd2"]
    fleet = choose_fleet(path, exclude=["csd1"], failed_from=failed_from)
    assert [node.name for node in fleet.nodes] == ["csd2"]
    for content in ('{"failed": {"other": {}}}', '{"failed": {"cs'):
        failed_from.write_text(content)
        with pytest.raises(InputError):
            choose_fleet(path, failed_from=failed_from)
