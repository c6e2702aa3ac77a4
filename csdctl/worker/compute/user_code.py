"""User code by reference `FILE.py:NAME`; run on the host only."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csdctl.worker.process.errors import WorkerError, describe


def load_function(reference: str) -> Any:
    """Return the function that `reference` names; raises WorkerError, exit code 2, if there is none."""
    path, _, name = reference.rpartition(":")
    function = getattr(_import(Path(path)), name, None)
    if not callable(function):
        raise WorkerError(f"{path} has no function {name!r}", exit_code=2)
    return function


def run_user_code(description: str, code: Callable[[], Any]) -> Any:
    """Return what `code` returns; whatever it raises, even SystemExit, becomes a WorkerError."""
    try:
        return code()
    except BaseException as error:
        raise WorkerError(
            f"{description} fails: {describe(error)}",
            remedy="fix the model's code, or model_args",
            exit_code=2,
        ) from None


def _import(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise WorkerError(f"{path} cannot be imported", exit_code=2)
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent.resolve()))
    run_user_code(f"{path}", lambda: specification.loader.exec_module(module))  # type: ignore[union-attr]
    return module
