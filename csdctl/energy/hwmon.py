"""hwmon: power sensors such as the INA219, INA226 and INA231, and energy counters, in /sys/class/hwmon.

Documentation/hwmon/sysfs-interface.rst of Linux: `power*_input` and `power*_average` are in microwatts,
`energy*_input` in microjoules, without an end.
"""

import re

from csdctl.energy.reading import Counter, Reading, parse_number, parse_watts

# $1: a pattern of files. Not split at spaces, since IFS is empty.
SCRIPT = """\
(IFS=; for file in $1
do read -r value <"$file" && echo "$value $file" || echo "refused $file"
done) 2>/dev/null"""
REMEDY = "`path` names files such as /sys/class/hwmon/hwmon2/power1_input; look at `name` beside them"

_POWER = re.compile(r"power\d+_(input|average)")
_ENERGY = re.compile(r"energy\d+_input")


def parse_hwmon(output: str) -> Reading:
    """Return the sum of all files, which are powers or counters, not both; raises ValueError."""
    watts: list[float] = []
    counters: dict[str, Counter] = {}
    for line in output.splitlines():
        value, _, path = line.partition(" ")
        name = path.rpartition("/")[2]
        if value == "refused":
            raise ValueError(f"{path[:200]} cannot be read")
        if _POWER.fullmatch(name):
            watts.append(parse_watts(str(parse_number(value, "microwatts") / 1e6)))
        elif _ENERGY.fullmatch(name):
            counters[path] = Counter(parse_number(value, "microjoules") / 1e6)
        else:
            raise ValueError(f"expected power*_input or energy*_input, received {path[:200]!r}")
    if bool(watts) == bool(counters):
        raise ValueError("expected powers or energy counters" + (", received both" if watts else ""))
    return Reading(counters=counters) if counters else Reading(sum(watts))
