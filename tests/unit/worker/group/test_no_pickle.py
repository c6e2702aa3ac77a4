"""Nothing in csdctl unpickles what another machine has sent."""

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path

from csdctl.worker.group import mpi

PACKAGE = Path(mpi.__file__).parents[2]
MPI_MODULE = Path(mpi.__file__)
EXAMPLES = PACKAGE / "workflows" / "data" / "examples"
"""Written for the user, who runs them on a package whose hash csdctl knows. Nothing imports them."""
LOADERS = "(?:pickle|marshal|shelve|dill|cloudpickle|joblib)"
LOADS = rf"""allow_pickle=(?!False)|(?:import_module|__import__)\(.(?:mpi4py|{LOADERS})"""
IMPORTS = rf"^\s*(?:import {LOADERS}\b|from {LOADERS}\b(?! import dumps\s*(?:#|$)))"
"""The import of marshal's `dumps` alone writes bytecode for other machines. Ruff sees imports of mpi4py."""


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_nothing_unpickles() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent != EXAMPLES]
    assert MPI_MODULE in paths
    matches = {str(path): re.findall(f"{LOADS}|{IMPORTS}", path.read_text(), re.MULTILINE) for path in paths}
    assert {path: lines for path, lines in matches.items() if lines} == {}


def test_no_call_of_mpi4py_for_python_objects_is_used_or_offered() -> None:
    """Those for memory begin with a capital."""
    listing = "[name for name in dir(kind) if name[0].islower() and callable(getattr(kind, name))]"
    pickling = set(ast.literal_eval(run(f"from mpi4py.MPI import Intracomm as kind\nprint({listing})")))
    pickling -= {"barrier", "f2py", "py2f", "free", "fromhandle", "fromint", "toint", "tompi"}
    assert {"send", "recv", "bcast", "allgather", "allreduce"} <= pickling
    nodes = ast.walk(ast.parse(MPI_MODULE.read_text()))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert not (used | {*vars(mpi.World)}) & pickling


def test_pickle_that_arrives_all_the_same_is_refused() -> None:
    """In a process that has entered MPI, even mpi4py's own loader refuses."""
    program = (
        "import sys\n"
        "from csdctl.worker.group.mpi import init_mpi\n"
        "init_mpi()\n"
        "from mpi4py import MPI\n"
        "try:\n"
        "    MPI.COMM_SELF.bcast('anything')\n"
        "    MPI.pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__)\n"
    )
    assert run(program, pickle.dumps("anything").hex()) == "LinkLostError\n"
