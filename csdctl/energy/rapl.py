"""RAPL: energy counters of processor packages and memory, in /sys/class/powercap.

Documentation/power/powercap/powercap.rst of Linux: `energy_uj` counts microjoules and starts again at 0 after
`max_energy_range_uj`. Packages contain their cores; memory (`dram`) is counted apart. `psys`, the whole
board of some laptops, contains both, and is left out.
"""

from csdctl.energy.reading import Counter, Reading, parse_number

# $1: the directory of sysfs. Files of the counters are readable by root alone since Linux 5.10.
SCRIPT = """\
for zone in "$1"/class/powercap/intel-rapl:*; do
  read -r name 2>/dev/null <"$zone/name" || continue
  case $name in package-*|dram) ;; *) continue ;; esac
  if read -r energy <"$zone/energy_uj" && read -r range <"$zone/max_energy_range_uj"
  then echo "${zone##*/} $name $energy $range"
  else echo "${zone##*/} $name refused"
  fi
done 2>/dev/null"""

UDEV_RULE = (
    'SUBSYSTEM=="powercap", KERNEL=="intel-rapl:*", ACTION=="add", RUN+="/bin/chown {user} /sys%p/energy_uj"'
)
"""As in the roles of ansible/ and in docs/how-to/energy.md."""
REMEDY = (
    "only root may read energy_uj, because it can betray what others compute (CVE-2020-8694). To let a user "
    f"read it, write to /etc/udev/rules.d/70-rapl.rules: {UDEV_RULE.format(user='USER')} — then run "
    "`udevadm control --reload && udevadm trigger --action=add --subsystem-match=powercap`"
)


def parse_rapl(output: str) -> Reading:
    """Return the counters of packages and memory; raises ValueError, PermissionError without permission."""
    counters: dict[str, Counter] = {}
    for line in output.splitlines():
        match line.split():
            case [zone, _, "refused"]:
                raise PermissionError(f"{zone[:80]}/energy_uj cannot be read")
            case [zone, name, *numbers] if len(numbers) == 2:
                pass
            case _:
                raise ValueError(f"expected zone, name, energy and range, received {line[:80]!r}")
        energy_uj, range_uj = (parse_number(number, "microjoules") for number in numbers)
        counters[f"{zone} {name}"] = Counter(energy_uj / 1e6, range_uj / 1e6)
    if not counters:
        raise ValueError("no package in /sys/class/powercap: the processor or its kernel has no RAPL")
    return Reading(counters=counters)
