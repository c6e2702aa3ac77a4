"""Callbacks of the command line: the function that `FILE.py:NAME` names, from the user's own file."""

import runpy
import sys
import traceback
from pathlib import Path

from csdctl.errors import InputError
from csdctl.notify import shorten
from csdctl.supervision.event_callbacks import Callback

MAX_ERROR_CHARS = 500


def load_callback(reference: str) -> Callback:
    """Run the file and return its function NAME; raises InputError.

    What lies beside the file can be imported, after what is installed.
    """
    written, _, name = reference.rpartition(":")
    path = Path(written).expanduser()
    if path.suffix != ".py" or not name.isidentifier():
        raise InputError(f"received callback {reference!r}", remedy="expected FILE.py:NAME")
    if not path.is_file():
        raise InputError(f"the file of callback {reference} does not exist")
    found = _run(path, reference).get(name)
    if not callable(found):
        what = "is not a function" if found is not None else "does not exist"
        raise InputError(f"{name} {what} in {path}", remedy=f"define it: def {name}(event): …")
    return found


def _run(path: Path, reference: str) -> dict[str, object]:
    """Run a file as a module, and return what it defines."""
    sys.path.append(str(path.resolve().parent))
    try:
        return runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        line = next((f" in line {at.lineno}" for at in _frames(error, path)), "")
        what = shorten(f"{type(error).__name__}: {error}", MAX_ERROR_CHARS)
        raise InputError(f"the file of callback {reference} failed{line}: {what}") from error


def _frames(error: BaseException, path: Path) -> list[traceback.FrameSummary]:
    """Return where in the file the error arose, the innermost place first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in reversed(frames) if frame.filename == str(path)]
