"""`csdctl train --callback FILE.py:NAME`: which files are taken, and what is said of the others."""

from pathlib import Path

import pytest

from csdctl.cli.commands.training import load_callback
from csdctl.errors import InputError


def write(directory: Path, content: str, name: str = "log.py") -> Path:
    path = directory / name
    path.write_text(content)
    return path


def test_function_is_loaded_and_imports_what_lies_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "FACTOR = 2\n", "beside_the_callback.py")
    path = write(
        tmp_path, "import beside_the_callback as b\n\ndef log(event):\n    return b.FACTOR * event\n"
    )
    assert load_callback(f"{path}:log")(21) == 42  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", ["log.py", "log:log", "log.py:", "log.py:no name", ":log", ""])
def test_other_references_are_refused(reference: str) -> None:
    with pytest.raises(InputError, match="expected FILE.py:NAME"):
        load_callback(reference)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("other = 1\n", "log does not exist in"),
        ("log = 1\n", "log is not a function in"),
        ("import nosuchmodule\n", "failed in line 1: ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("x = 1\ny = x.z\n", "failed in line 2: AttributeError"),
        ("def log(:\n", "SyntaxError"),
        ("import sys\nsys.exit('no')\n", "failed in line 2: SystemExit: no"),
    ],
)
def test_file_that_cannot_be_used_says_why(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError) as caught:
        load_callback(f"{path}:log")
    assert message in str(caught.value)
