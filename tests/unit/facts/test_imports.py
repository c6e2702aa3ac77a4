"""Looking for modules with a machine's Python."""

import sys
from pathlib import Path

import pytest

from csdctl.errors import RemoteCommandError
from csdctl.facts.software import find_missing, parse_missing
from csdctl.transport.local import LocalSession


@pytest.fixture
def session(tmp_path: Path) -> LocalSession:
    return LocalSession("csd3", tmp_path)


def test_modules_are_looked_for_and_not_imported(session: LocalSession, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    # `this` prints a text when it is imported.
    asked = ["numpy", "this", "no_such_module", "beside", "__main__"]
    assert find_missing(session, sys.executable, asked) == ("no_such_module", "beside")


@pytest.mark.parametrize("output", ["", "[1]", '["other"]', "{}", "null", "[" * 100_000])
def test_other_output_is_an_error(output: str) -> None:
    with pytest.raises(ValueError, match="which modules it finds"):
        parse_missing(["scipy"], output)


def test_python_that_does_not_run_is_named(session: LocalSession) -> None:
    with pytest.raises(RemoteCommandError, match="which modules it finds") as caught:
        find_missing(session, "/no/python", ["scipy"])
    assert caught.value.node == "csd3"
