"""All power sources by name, and one reading of each."""

from collections.abc import Callable
from dataclasses import dataclass

from csdctl.energy import hwmon, ipmi, meter_csv, nvidia_smi, rapl, redfish
from csdctl.energy.reading import Reading
from csdctl.fleet.model import PowerSource

SYSFS = "/sys"


@dataclass(frozen=True)
class ScriptSource:
    """A source that a shell script on the machine reads, with `argument` as $1; `parse` raises ValueError."""

    script: str
    parse: Callable[[str], Reading]
    remedy: str
    argument: Callable[[PowerSource], str] = lambda power: ""


def _sysfs(power: PowerSource) -> str:
    return SYSFS


def _path(power: PowerSource) -> str:
    return power.path


SCRIPTS: dict[str, ScriptSource] = {
    "rapl": ScriptSource(rapl.SCRIPT, rapl.parse_rapl, rapl.REMEDY, _sysfs),
    "hwmon": ScriptSource(hwmon.SCRIPT, hwmon.parse_hwmon, hwmon.REMEDY, _path),
    "ipmi": ScriptSource(ipmi.SCRIPT, ipmi.parse_dcmi, ipmi.REMEDY),
    "nvidia-smi": ScriptSource(nvidia_smi.SCRIPT, nvidia_smi.parse_nvidia_smi, nvidia_smi.REMEDY),
}
REMEDIES = {name: source.remedy for name, source in SCRIPTS.items()} | {
    "redfish": redfish.REMEDY,
    "csv": meter_csv.REMEDY,
}
BEGIN, END = "@csdctl-power", "@csdctl-power-end"
MAX_READING_LINES = 1000


def build_loop(source: ScriptSource, argument: str) -> list[str]:
    """Build the command that prints a reading every second, between BEGIN with the machine's time and END.

    It ends when nobody reads it any more.
    """
    loop = f"""\
LC_ALL=C; export LC_ALL
while read -r uptime rest </proc/uptime && echo "{BEGIN} $uptime"; do
{source.script}
echo "{END}" || exit
sleep 1 || exit
done"""
    return ["sh", "-c", loop, "csdctl-power", argument]


class ReadingLines:
    """Puts the lines of the loop together to readings; other lines are left out."""

    def __init__(self, parse: Callable[[str], Reading]) -> None:
        self._parse = parse
        self._time_s: float | None = None
        self._lines: list[str] = []

    def add(self, line: str) -> tuple[float, Reading] | None:
        """Return the machine's time and a reading when `line` completes it; raises ValueError or OSError."""
        if line.startswith(BEGIN + " "):
            self._time_s, self._lines = float(line.removeprefix(BEGIN)), []
        elif line == END and self._time_s is not None:
            time_s, self._time_s = self._time_s, None
            return time_s, self._parse("\n".join(self._lines))
        elif self._time_s is not None and len(self._lines) < MAX_READING_LINES:
            self._lines.append(line)
        return None
