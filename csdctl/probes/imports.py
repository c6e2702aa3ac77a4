"""Which modules a machine's Python finds; it looks for them and imports none."""

import json
import shlex
from collections.abc import Sequence
from functools import partial

from csdctl.errors import RemoteCommandError
from csdctl.probes.probe import FactProbe, FactValues, build_command, parse_outputs
from csdctl.transport.session import Session

DEADLINE_S = 60.0

# `-P`, as for the worker: modules of the working directory do not count.
_PROGRAM = """\
import importlib.util, json, sys
def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except Exception:
        return False
print(json.dumps([name for name in sys.argv[1:] if is_missing(name)]))"""


def imports_probe(modules: Sequence[str]) -> FactProbe:
    """Return the probe for top-level `modules`; its value is `missing_modules`."""
    names = " ".join(map(shlex.quote, modules))
    return FactProbe("imports", f"\"$1\" -P -c '{_PROGRAM}' {names}", partial(parse_missing, modules))


def parse_missing(modules: Sequence[str], output: str) -> FactValues:
    """Parse the output of the program above; raises ValueError for anything but a part of `modules`."""
    try:
        missing = json.loads(output)
    except (ValueError, RecursionError):
        missing = None
    if not isinstance(missing, list) or not all(name in modules for name in missing):
        raise ValueError("its Python does not tell which modules it finds")
    return {"missing_modules": tuple(missing)}


def find_missing(session: Session, python: str, modules: Sequence[str]) -> tuple[str, ...]:
    """Return those of `modules` that the machine's Python does not find.

    Raises RemoteCommandError, DeadlineError or UnreachableError.
    """
    probe = imports_probe(modules)
    completed = session.run(build_command((probe,), python), deadline_s=DEADLINE_S)
    values, notes = parse_outputs((probe,), completed.output, session.name)
    if "missing_modules" not in values:
        raise RemoteCommandError(
            "; ".join(notes), node=session.name, remedy=f"check its Python: {shlex.quote(python)}"
        )
    return tuple(map(str, values["missing_modules"]))  # type: ignore[call-overload]
