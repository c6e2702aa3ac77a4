"""Fabric tasks of the user: found by name, with typed arguments, and run on nodes over a real SSH server."""

from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import DeadlineError, InputError, NodeError
from csdctl.fleet.model import Fleet
from csdctl.workflows.exec.run_command import ExecOptions, ExecResult
from csdctl.workflows.exec.run_task import load_task, run_task
from tests.patience import scaled
from tests.unit.transport.conftest import running_server

TASKS = """\
from fabric import task
from beside import SUFFIX

@task
def first(c):
    c.calls.append("first")

@task
def last(c):
    c.calls.append("last")

@task(pre=[first], post=[last], iterable=["paths"])
def deploy(c, name, count=1, force=False, paths=None):
    c.calls.append((name + SUFFIX, count, force, paths))

@task(name="other-name")
def other(c, a_b=""):
    pass
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "my_tasks.py").write_text(TASKS)
    (tmp_path / "jobs" / "beside.py").write_text("SUFFIX = '!'\n")
    (tmp_path / "jobs" / "old_tasks.py").write_text("from fabric.api import run\n")
    return tmp_path


def test_task_gets_its_arguments_and_its_neighbours(directory: Path) -> None:
    from invoke.context import Context

    class Recorder(Context):
        calls: list[object] = []

    words = ["--name", "a=b", "--count=3", "--force", "--paths", "x", "--paths=y"]
    load_task("jobs/my_tasks.py:deploy", words, directory)(Recorder())
    assert Recorder.calls == ["first", ("a=b!", 3, True, ["x", "y"]), "last"]
    load_task("jobs/my_tasks.py:other_name", ["--a-b=1"], directory)(Recorder())


@pytest.mark.parametrize(
    ("spec", "words", "message"),
    [
        ("deploy", [], "is not FILE.py:TASK"),
        ("none.py:deploy", [], "is not a Python file"),
        ("jobs/old_tasks.py:deploy", [], "Fabric 1"),
        ("jobs/my_tasks.py:nope", [], "its tasks: deploy, first, last, other-name"),
        ("jobs/my_tasks.py:deploy", [], "did not receive required positional arguments: 'name'"),
        ("jobs/my_tasks.py:deploy", ["x", "--nmae=1"], "No idea what '--nmae' is!"),
        ("jobs/my_tasks.py:deploy", ["--name=x", "--count=many"], "invalid literal for int()"),
    ],
)
def test_what_does_not_fit_is_bad_input(directory: Path, spec: str, words: list[str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        load_task(spec, words, directory)
    assert message in str(raised.value)


OWN = """\
import sys

from fabric import task


@task
def ends(c, how):
    print("printed \\ud83d", file=sys.stderr)
    c.run("echo ran")
    c.run("echo hidden", hide=True)
    c.local("echo here")
    if how == "exit":
        sys.exit(4)
    if how == "command":
        c.run("exit 5")
    if how == "deadline":
        c.run("sleep 600", timeout=0.5)
    if how == "bug":
        raise KeyError("x")
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    """A node that is known, and tasks."""
    with running_server(tmp_path / "node") as server:
        server.trust_in(tmp_path)
        (tmp_path / "own_tasks.py").write_text(OWN)
        yield Fleet((server.node(),), path=tmp_path / "fleet.yaml")


def run(fleet: Fleet, name: str, *words: str) -> ExecResult:
    options = ExecOptions(scaled(30), scaled(10))
    return run_task(fleet, f"own_tasks.py:{name}", words, directory=fleet.path.parent, options=options)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("well", (0, "")),
        ("exit", (4, "the task ended with exit code 4")),
        ("command", (5, "`exit 5` ended with exit code 5")),
        ("deadline", DeadlineError),
        ("bug", NodeError),
    ],
)
def test_ends_of_a_task(fleet: Fleet, how: str, expected: Any) -> None:
    result = run(fleet, "ends", f"--how={how}")
    if isinstance(expected, tuple):
        answer = result.answers["csd0"]
        assert (answer.exit_code, answer.error) == expected
        assert (answer.stdout, answer.stderr) == (b"ran\nhere\n", b"printed \\ud83d\n")
    else:
        assert type(result.outcomes["csd0"].error) is expected
