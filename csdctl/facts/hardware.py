"""CPU, memory, disk, NVMe drives, and limits from control groups and the environment."""

import math
import re

from csdctl.facts.fact import Fact, FactValues, text_fact
from csdctl.fleet.facts import MAX_SHOWN, Drive


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


_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 represents "no limit" as a number near 2⁶³."""

# Every parent group may limit it too. In a container that hides its place in the tree, the path does not
# exist, and walking up ends at the root, which is the container's own group.
_LIMITS_SCRIPT = """\
echo "cpu_environment $CSDCTL_CPU_LIMIT"
echo "memory_environment $CSDCTL_MEMORY_LIMIT"
sed -n 's/^Cpus_allowed_list:/cpus_allowed/p' /proc/self/status
walk() {
  place=$2
  while :; do
    for file in cpu.max memory.max cpu.cfs_quota_us cpu.cfs_period_us memory.limit_in_bytes; do
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
    *,cpu,* | *,memory,*) walk "/sys/fs/cgroup/$controllers" "$place" ;;
  esac
done </proc/self/cgroup"""


def parse_meminfo(output: str) -> FactValues:
    """Parse /proc/meminfo; kernels before 3.14 have no MemAvailable."""
    sizes = {
        name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", output, re.MULTILINE)
    }
    if "MemTotal" not in sizes:
        raise ValueError("/proc/meminfo has no MemTotal")
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0) + sizes.get("Cached", 0))
    return {"memory_bytes": sizes["MemTotal"], "memory_available_bytes": available}


def parse_disk_free(output: str) -> FactValues:
    """Parse `df -Pk` of one directory."""
    found = re.search(r"\s\d+\s+\d+\s+(\d+)\s+(?:\d+%|-)\s", output)
    if not found:
        raise ValueError(f"`df -Pk` printed {output.strip()[-MAX_SHOWN:]!r}")
    return {"disk_free_bytes": int(found[1]) * 1024}


def parse_limits(output: str) -> FactValues:
    """Return the tightest limits of control groups, CPU affinity and the environment."""
    if not output.strip():
        raise ValueError("no output")
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
                cpus.append(_num_in_ranges(ranges))
            case "cpu.max", [quota, period] if quota != "max":
                cpus.append(_share(quota, period))
            case "cpu.cfs_quota_us", [quota]:
                quota_us = int(quota)
            case "cpu.cfs_period_us", [period] if quota_us > 0:
                cpus.append(_share(quota_us, period))
            case "memory.max" | "memory.limit_in_bytes", [limit] if limit != "max":
                sizes.append(int(limit))
    memory_bytes = min((size for size in sizes if size < _UNLIMITED_BYTES), default=None)
    return {
        "cpu_limit": float(min(cpus)) if cpus else None,
        "memory_limit_bytes": None if memory_bytes is None else int(memory_bytes),
    }


def _positive(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ValueError(f"{name} is {text[:MAX_SHOWN]!r} there, expected a positive number")
    return value


def _share(quota: str | int, period: str) -> float:
    if int(period) < 1:
        raise ValueError(f"the period of its CPU quota is {period[:MAX_SHOWN]}, expected a positive number")
    return int(quota) / int(period)


def _num_in_ranges(ranges: str) -> int:
    """Return how many numbers `0-3,8` contains."""
    ends = [part.split("-") for part in ranges.split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


SECTOR_BYTES = 512
"""The unit of /sys, whatever the drive's sector size is."""

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


def parse_nvme(output: str) -> FactValues:
    """Parse the drives, in device order, without those that have no serial number."""
    if not output.startswith("begin"):
        raise ValueError("no output")
    drives = []
    for block in re.split(r"^controller ", output, flags=re.MULTILINE)[1:]:
        device, *lines = block.splitlines()
        values = [line.partition(" ")[::2] for line in lines]
        named = {key: value.strip() for key, value in values}
        sizes = [int(value) * SECTOR_BYTES for key, value in values if key == "sectors" and value.isdigit()]
        if named.get("serial"):
            drives.append(
                Drive(
                    device=f"/dev/{device}",
                    serial=named["serial"],
                    model=named.get("model", ""),
                    size_bytes=sum(sizes) if sizes else None,
                )
            )
    return {"drives": tuple(sorted(drives, key=lambda drive: (len(drive.device), drive.device)))}


HARDWARE_FACTS = (
    text_fact("architecture", "uname -m", "architecture"),
    Fact("CPU", "cat /proc/cpuinfo; lscpu", parse_cpuinfo),
    Fact("memory", "cat /proc/meminfo", parse_meminfo),
    Fact("limits", _LIMITS_SCRIPT, parse_limits),
    Fact("disk", "df -Pk .", parse_disk_free),
    Fact("NVMe drives", NVME_SCRIPT, parse_nvme),
)
