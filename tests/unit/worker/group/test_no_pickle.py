"""Nothing in csdctl unpickles what another machine has sent: the rule, and that it finds what it is for."""

import ast
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.worker.group import mpi

PACKAGE = Path(mpi.__file__).parents[2]
MPI_MODULE = Path(mpi.__file__)
EXAMPLES = PACKAGE / "workflows" / "data" / "examples"
"""Written for the user, who runs them on a package whose hash csdctl knows; nothing imports them."""
PICKLING = {
    *("send", "recv", "isend", "irecv", "bsend", "ibsend", "ssend", "issend", "sendrecv", "rsend", "irsend"),
    *("mprobe", "improbe", "probe", "iprobe", "bcast", "gather", "scatter", "allgather", "alltoall"),
    *("reduce", "allreduce", "scan", "exscan", "neighbor_allgather", "neighbor_alltoall"),
}
"""mpi4py's calls for Python objects; those for memory begin with a capital."""
LOADERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def problems_of(source: str, *, is_mpi_module: bool) -> Iterator[str]:
    """Yield what `source` uses of mpi4py beyond memory, and of modules that run what they load."""
    for node in ast.walk(ast.parse(source)):
        for module in _imported_by(node):
            root = module.partition(".")[0]
            if root in LOADERS or (root == "mpi4py" and not is_mpi_module):
                yield f"line {node.lineno}: imports {root}"
        if is_mpi_module and isinstance(node, ast.Attribute) and node.attr in PICKLING:
            yield f"line {node.lineno}: calls {node.attr}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found = ast.unparse(node.value)
            if found != "False":
                yield f"line {node.value.lineno}: allow_pickle={found}"


def _imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not _only_writes(node):
        return [node.module or ""]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = ast.unparse(node.func)
        if name in ("__import__", "import_module", "importlib.import_module"):
            return [str(node.args[0].value)]
    return []


def _only_writes(node: ast.ImportFrom) -> bool:
    """Return whether nothing but marshal's `dumps` is imported: bytecode for other machines is written."""
    return node.module == "marshal" and [alias.name for alias in node.names] == ["dumps"]


def test_nothing_unpickles() -> None:
    found = {
        str(path.relative_to(PACKAGE)): list(problems_of(path.read_text(), is_mpi_module=path == MPI_MODULE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != EXAMPLES
    }
    assert found
    assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    ("source", "is_mpi_module"),
    [
        ("from mpi4py import MPI", False),
        ("importlib.import_module('mpi4py')", False),
        ("self._communicator.allgather(value)", True),
        ("world.comm.recv(source=1)", True),
        ("import pickle", True),
        ("from marshal import dumps, loads", False),
        ("np.load(path, allow_pickle=True)", False),
    ],
)
def test_rule_finds_what_it_is_for(source: str, is_mpi_module: bool) -> None:
    assert len(list(problems_of(source, is_mpi_module=is_mpi_module))) == 1


def test_list_of_pickling_calls_is_that_of_mpi4py_and_world_offers_none() -> None:
    program = (
        "from mpi4py import MPI\n"
        "names = [name for name in dir(MPI.Intracomm) if name[0].islower()]\n"
        "print([name for name in names if callable(getattr(MPI.Intracomm, name))])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    without_objects = {"barrier", "f2py", "py2f", "free", "fromhandle", "fromint", "toint", "tompi"}
    assert set(ast.literal_eval(done.stdout)) - without_objects <= PICKLING
    assert not {name for name in dir(mpi.World) if not name.startswith("_")} & PICKLING


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
    payload = pickle.dumps("anything").hex()
    done = subprocess.run(
        [sys.executable, "-c", program, payload], capture_output=True, text=True, check=True
    )
    assert done.stdout == "LinkLostError\n"
