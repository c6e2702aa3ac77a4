"""Facts that `discover` collects about machines; saved next to fleet.yaml, never in it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from csdctl.documents import load_json, save_json
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet

SCHEMA = 1
DISCOVER = "run `csdctl discover` again"


@dataclass(frozen=True)
class Drive:
    """An NVMe drive as a machine reports it; `size_bytes` None: no namespace is visible."""

    device: str
    serial: str
    model: str = ""
    size_bytes: int | None = None


@dataclass(frozen=True)
class Facts:
    """Facts about one machine; None means unknown.

    `cpu_limit` and `memory_limit_bytes` are limits set by a container, a cgroup or the environment
    (CSDCTL_CPU_LIMIT, CSDCTL_MEMORY_LIMIT).
    """

    name: str
    architecture: str | None = None
    cpu_model: str | None = None
    cpu_features: tuple[str, ...] = ()
    num_cores: int | None = None
    cpu_limit: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    python_version: str | None = None
    tensorflow_version: str | None = None
    keras_version: str | None = None
    numpy_version: str | None = None
    mpi_version: str | None = None
    mpi4py_version: str | None = None
    glibc_version: str | None = None
    prefix: str | None = None
    """sys.prefix of the node's Python, which contains `bin/prted`."""
    has_prted: bool | None = None
    home: str | None = None
    clock_offset_s: float | None = None
    round_trip_s: float | None = None
    drives: tuple[Drive, ...] = ()
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
        known = [size for size in (self.memory_available_bytes, self.memory_limit_bytes) if size]
        return min(known) if known else None


def facts_path(fleet: Fleet) -> Path:
    """Return the path of the facts of `fleet`: fleet.yaml → fleet.facts.json."""
    return fleet.path.with_suffix(".facts.json")


def save_facts(fleet: Fleet, facts: dict[str, Facts]) -> Path:
    """Write `facts`, by machine name, next to the fleet file."""
    path = facts_path(fleet)
    save_json(
        path, {"schema": SCHEMA, "machines": {name: asdict(machine) for name, machine in facts.items()}}
    )
    return path


def load_facts(fleet: Fleet) -> dict[str, Facts]:
    """Read the facts saved by `discover`; raises InputError if there are none."""
    path = facts_path(fleet)
    content = load_json(path)
    try:
        if content["schema"] != SCHEMA:
            raise InputError(f"{path} has schema {content['schema']!r}, expected {SCHEMA}", remedy=DISCOVER)
        return {name: _facts(values) for name, values in content["machines"].items()}
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{path} was not written by `csdctl discover`", remedy=DISCOVER) from None


def back_up_facts(fleet: Fleet) -> Path:
    """Rename the unreadable facts file to *.bak, replacing an older backup."""
    path = facts_path(fleet)
    return path.replace(path.with_name(path.name + ".bak"))


def _facts(values: dict[str, Any]) -> Facts:
    lists = {key: tuple(values.get(key, ())) for key in ("cpu_features", "notes")}
    return Facts(**{**values, **lists, "drives": tuple(Drive(**drive) for drive in values.get("drives", ()))})
