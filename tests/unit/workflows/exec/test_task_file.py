"""Fabric tasks of the user: found by name, with arguments as the types of their defaults."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.workflows.exec.task_file import load_task

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
def other(c, **anything):
    pass
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "my_tasks.py").write_text(TASKS)
    (tmp_path / "jobs" / "beside.py").write_text("SUFFIX = '!'\n")
    return tmp_path


def test_task_gets_its_arguments_and_its_neighbours(directory: Path) -> None:
    from invoke.context import Context

    class Recorder(Context):
        calls: list[object] = []

    words = ["name=a=b", "--count=3", "force=yes", "paths=x", "paths=y"]
    load_task("jobs/my_tasks.py:deploy", words, directory).run(Recorder())
    assert Recorder.calls == ["first", ("a=b!", 3, True, ["x", "y"]), "last"]
    assert load_task("jobs/my_tasks.py:other-name", ["a-b=1"], directory).arguments == {"a_b": "1"}


@pytest.mark.parametrize(
    ("spec", "words", "message"),
    [
        ("deploy", [], "is not FILE.py:TASK"),
        ("none.py:deploy", [], "does not exist"),
        ("jobs/my_tasks.py:nope", [], "its tasks: deploy, first, last, other-name"),
        ("jobs/my_tasks.py:deploy", [], "needs name"),
        ("jobs/my_tasks.py:deploy", ["nmae=x"], "'nmae=x' is not an argument of deploy"),
        ("jobs/my_tasks.py:deploy", ["name=x", "count=many"], "expected a number"),
        ("jobs/my_tasks.py:deploy", ["name=x", "force=maybe"], "expected yes or no"),
    ],
)
def test_what_does_not_fit_is_bad_input(directory: Path, spec: str, words: list[str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        load_task(spec, words, directory)
    assert message in str(raised.value)


def test_file_for_fabric_1_says_so(tmp_path: Path) -> None:
    (tmp_path / "old_tasks.py").write_text("from fabric.api import run\n")
    with pytest.raises(InputError, match="Fabric 1"):
        load_task("old_tasks.py:x", [], tmp_path)
