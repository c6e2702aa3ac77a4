"""Facts about machines, which `discover` saves next to fleet.yaml, and their current condition.

A machine may answer anything. The types here say which facts are possible, whether they come from the machine
or from the file.
"""

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from csdctl.documents import check_values, load_json, save_json
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.notify import shorten

SCHEMA = 1
DISCOVER = "run `csdctl discover` again"

MAX_SHOWN = 80

NETWORK_FILE_SYSTEMS = ("nfs", "smb", "smb2", "cifs", "v9fs", "fuse", "fuseblk", "lustre", "ceph", "gpfs")
"""As `stat -f` names those that other machines may read."""

FINITE = ConfigDict(allow_inf_nan=False)

NumBytes = Annotated[int, Field(strict=True, ge=0, le=1 << 64)]
_Memory = Annotated[int, Field(strict=True, ge=1, le=1 << 60)]
_MAX_CORES = 1 << 16
_Seconds = Annotated[float, Field(strict=True, ge=-1e11, le=1e11)]
# Lengths apart from patterns: one with {0,4095} takes 20 ms to compile.
_Word = Annotated[str, Field(pattern=r"^[\x21-\x7e]+$", max_length=64)]
_Version = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+!_-]*$", max_length=64)]
_Label = Annotated[str, Field(max_length=128)]
"""A name that a manufacturer chose."""
PathText = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f-\x9f]*$", max_length=4096)]
"""An absolute path that fits in one line."""


@dataclass(frozen=True)
class Drive:
    """An NVMe drive as a machine reports it. `size_bytes` None: no namespace is visible."""

    device: PathText
    serial: _Label
    model: _Label = ""
    size_bytes: NumBytes | None = None


@dataclass(frozen=True, config=FINITE)
class Facts:
    """Facts about one machine. None means unknown. Limits are of a container, a cgroup or CSDCTL_*_LIMIT."""

    name: str
    architecture: _Word | None = None
    cpu_model: _Label | None = None
    cpu_features: Annotated[tuple[_Word, ...], Field(max_length=1000)] = ()
    num_cores: Annotated[int, Field(strict=True, ge=1, le=_MAX_CORES)] | None = None
    cpu_limit: Annotated[float, Field(strict=True, gt=0, le=_MAX_CORES)] | None = None
    memory_bytes: _Memory | None = None
    memory_limit_bytes: _Memory | None = None
    memory_available_bytes: NumBytes | None = None
    limits: Annotated[tuple[tuple[_Label, NumBytes], ...], Field(max_length=100)] = ()
    """Limits of processes that are not unlimited, by name."""
    disk_free_bytes: NumBytes | None = None
    python_version: _Version | None = None
    tensorflow_version: _Version | None = None
    keras_version: _Version | None = None
    """A node needs Keras only for a step that cannot be compiled."""
    dropped: Annotated[tuple[_Word, ...], Field(max_length=1000)] = ()
    numpy_version: _Version | None = None
    mpi_version: _Version | None = None
    mpi4py_version: _Version | None = None
    glibc_version: _Version | None = None
    accelerator: _Label | None = None
    accelerator_memory_bytes: _Memory | None = None
    driver_version: _Version | None = None
    has_cuda: Annotated[bool, Field(strict=True)] | None = None
    """Whether CUDA for TensorFlow is installed as packages; None: it may be the system's."""
    noexec: Annotated[str, Field(max_length=4096)] = ""
    """Where file systems with files that a rank runs are mounted noexec."""
    prefix: PathText | None = None
    """sys.prefix of the node's Python, which contains `bin/prted`."""
    has_prted: Annotated[bool, Field(strict=True)] | None = None
    home: PathText | None = None
    file_system: _Label | None = None
    home_shared_with: Annotated[tuple[_Label, ...], Field(max_length=1000)] = ()
    """Other machines that have kept csdctl's files in the same home, by their directories' names."""
    clock_offset_s: _Seconds | None = None
    round_trip_s: _Seconds | None = None
    drives: Annotated[tuple[Drive, ...], Field(max_length=1000)] = ()
    notes: tuple[str, ...] = ()
    """Problems for the user to check, and facts that are unknown, with the reason."""
    problem: str | None = None
    """The error of a failed connection or probe; no other facts are known then."""

    @property
    def num_threads(self) -> int:
        """Threads for a rank: the cores, or fewer under a CPU limit."""
        cores = self.num_cores or 1
        return max(1, min(cores, int(self.cpu_limit))) if self.cpu_limit else cores

    @property
    def usable_memory_bytes(self) -> int | None:
        """Memory for a rank: the smaller of available memory and memory limit."""
        sizes = (self.memory_available_bytes, self.memory_limit_bytes)
        return min((size for size in sizes if size), default=None)


def facts_path(fleet: Fleet) -> Path:
    """Return the path of the facts of `fleet`: fleet.yaml → fleet.facts.json."""
    return fleet.path.with_suffix(".facts.json")


def save_facts(fleet: Fleet, facts: dict[str, Facts]) -> Path:
    """Write `facts`, by machine name, next to the fleet file."""
    save_json(path := facts_path(fleet), {"schema": SCHEMA, "machines": facts})
    return path


def load_facts(fleet: Fleet) -> dict[str, Facts]:
    """Read the facts saved by `discover`. Raises InputError if there are none."""
    path = facts_path(fleet)
    content = load_json(path, remedy=DISCOVER)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise InputError(f"{path} does not have schema {SCHEMA} of `csdctl discover`", remedy=DISCOVER)
    return check_values(content.get("machines"), dict[str, Facts], str(path), remedy=DISCOVER)


def list_invalid(error: ValidationError) -> dict[str, str]:
    """Return for each invalid field what was received, and what is expected."""
    described: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        field = str(problem["loc"][0]) if problem["loc"] else "a name"  # pydantic does not say which
        try:
            received = shorten(repr(problem["input"]), MAX_SHOWN)
        except ValueError:  # Python writes no integer of more than 4300 digits
            received = "a huge number"
        described.setdefault(field, f"{field.replace('_', ' ')} is {received}: {problem['msg']}")
    return described


_Address = Annotated[str, AfterValidator(lambda text: str(ip_address(text)))]


@dataclass(frozen=True)
class DirectorySpace:
    """Free space of a directory of ranks. `refusal`: why a test file could not be written, '' on success."""

    path: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$", max_length=4096)]
    free_bytes: NumBytes | None = None
    free_inodes: NumBytes | None = None
    refusal: Annotated[str, Field(max_length=500)] = ""


@dataclass(frozen=True, config=FINITE)
class Condition(Facts):
    """The facts of one machine, and its state at this moment, which only an examination needs."""

    addresses: Annotated[tuple[_Address, ...], Field(max_length=1000)] | None = None
    """The addresses of all interfaces, without link-local ones."""
    home_space: DirectorySpace | None = None
    temporary_space: DirectorySpace | None = None
    """TMPDIR, the directory for temporary files of MPI and Python."""
