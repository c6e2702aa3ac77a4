"""Reads the power of all machines during a run, once per second, and writes power.jsonl.

A source is a script that a machine runs, and the parser of its output. A thread for each machine that has a
source waits for what a shell loop there prints, over the session that is open anyway. A source that fails is
reported once, its machine has no energy from then on, and the run goes on.
"""

import csv
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from csdctl.errors import CsdctlError, DeadlineError
from csdctl.fleet.model import Fleet, PowerSource
from csdctl.notify import Say, make_printable, shorten
from csdctl.runs.directory import RunDirectory
from csdctl.runs.ledger import MEASURED, STATED, PowerLog, PowerRecord
from csdctl.transport.session import Session

MAX_WATTS = 20_000.0
"""More than any machine takes: a larger power is a damaged reading, or a counter that has started again."""
MAX_POWER_GAP_S = 10.0
"""Maximum time between two readings of a power; if it is longer, the energy is unknown."""


@dataclass(frozen=True)
class Counter:
    """An energy counter."""

    joules: float
    range_joules: float | None = None
    """Where it starts at 0 again; None: it does not."""


@dataclass(frozen=True)
class Reading:
    """Counters by name where the source has them, else the watts of this moment."""

    watts: float | None = None
    counters: Mapping[str, Counter] | None = None


@dataclass(frozen=True)
class Spent:
    """Energy of an interval; `joules` None: a gap, in which it is not known."""

    seconds: float
    joules: float | None


def parse_number(text: str, what: str) -> float:
    """Return a number that is finite and not negative; raises ValueError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"expected {what}, received {text[:40]!r}")
    return number


def parse_watts(text: str) -> float:
    """Return a power; raises ValueError for one that no machine has."""
    watts = parse_number(text, "watts")
    if watts > MAX_WATTS:
        raise ValueError(f"expected watts up to {MAX_WATTS:,.0f}, received {text[:40]!r}")
    return watts


class EnergyMeter:
    """Adds up the readings of one source, each with the machine's own time."""

    def __init__(self) -> None:
        self._last: tuple[float, Reading] | None = None

    def add(self, time_s: float, reading: Reading) -> Spent | None:
        """Return what was spent since the reading before; None for the first one, and after a restart."""
        last, self._last = self._last, (time_s, reading)
        if last is None or time_s <= last[0]:
            return None
        seconds = time_s - last[0]
        if reading.counters is not None:
            return Spent(seconds, _count(last[1].counters, reading.counters, seconds))
        before, now = last[1].watts, reading.watts
        if before is None or now is None or seconds > MAX_POWER_GAP_S:
            return Spent(seconds, None)
        return Spent(seconds, (before + now) / 2 * seconds)


def _count(before: Mapping[str, Counter] | None, now: Mapping[str, Counter], seconds: float) -> float | None:
    """Return the joules between two readings of the same counters; None where that cannot be known."""
    if before is None or before.keys() != now.keys() or not now:
        return None
    total = 0.0
    for name, counter in now.items():
        joules = counter.joules - before[name].joules
        if counter.range_joules is not None:
            if seconds * MAX_WATTS_OF_A_COUNTER > counter.range_joules:
                return None  # it may have started again more than once
            if joules < 0:
                joules += counter.range_joules
        if not 0 <= joules <= seconds * MAX_WATTS:
            return None  # it was set back
        total += joules
    return total


MAX_WATTS_OF_A_COUNTER = 1000.0
"""Maximum power of one package or memory channel; limits how long its counter may go unread."""


SYSFS = "/sys"
PREFIX = "@csdctl-power "

# RAPL: energy counters of processor packages and memory, in /sys/class/powercap.
# Documentation/power/powercap/powercap.rst of Linux: `energy_uj` counts microjoules and starts again at 0
# after `max_energy_range_uj`. Packages contain their cores; memory (`dram`) is counted apart. `psys`, the
# whole board of some laptops, contains both, and is left out.

# $1: the directory of sysfs. Files of the counters are readable by root alone since Linux 5.10.
RAPL_SCRIPT = """\
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
RAPL_REMEDY = (
    "only root may read energy_uj, because it leaks data of other programs (CVE-2020-8694). To let a user "
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


# hwmon: power sensors such as the INA219, INA226 and INA231, and energy counters, in /sys/class/hwmon.
# Documentation/hwmon/sysfs-interface.rst of Linux: `power*_input` and `power*_average` are in microwatts,
# `energy*_input` in microjoules, without an end.

# $1: a pattern of files. Not split at spaces, since IFS is empty.
HWMON_SCRIPT = """\
(IFS=; for file in $1
do read -r value <"$file" && echo "$value $file" || echo "refused $file"
done) 2>/dev/null"""
HWMON_REMEDY = "`path` names files such as /sys/class/hwmon/hwmon2/power1_input; see `name` next to them"


def parse_hwmon(output: str) -> Reading:
    """Return the sum of all files, which are powers or counters, not both; raises ValueError."""
    watts: list[float] = []
    counters: dict[str, Counter] = {}
    for line in output.splitlines():
        value, _, path = line.partition(" ")
        name = path.rpartition("/")[2]
        if value == "refused":
            raise ValueError(f"{path[:200]} cannot be read")
        if re.fullmatch(r"power\d+_(input|average)", name):
            watts.append(parse_watts(str(parse_number(value, "microwatts") / 1e6)))
        elif re.fullmatch(r"energy\d+_input", name):
            counters[path] = Counter(parse_number(value, "microjoules") / 1e6)
        else:
            raise ValueError(f"expected power*_input or energy*_input, received {path[:200]!r}")
    if bool(watts) == bool(counters):
        raise ValueError("expected powers or energy counters" + (", received both" if watts else ""))
    return Reading(counters=counters) if counters else Reading(sum(watts))


# IPMI: the power of a chassis by its management controller, as `ipmitool dcmi power reading` prints it.
# DCMI 1.5, section 6.6.1: watts of the moment, and their mean over the sampling period.

IPMI_SCRIPT = "ipmitool dcmi power reading 2>&1"
IPMI_REMEDY = "run `ipmitool dcmi power reading` there; it needs ipmitool, the driver ipmi_si and root"

_DCMI_WATTS = re.compile(r"^\s*Instantaneous power reading\s*:\s*(\S+)\s+Watts", re.MULTILINE)
_DCMI_STATE = re.compile(r"^\s*Power reading state is\s*:\s*(\S+)", re.MULTILINE)


def parse_dcmi(output: str) -> Reading:
    """Return the power of the moment; raises ValueError when the controller does not measure."""
    found, state = _DCMI_WATTS.search(output), _DCMI_STATE.search(output)
    if found is None:
        first = next((line for line in map(str.strip, output.splitlines()) if line), "")
        raise ValueError(f"expected `Instantaneous power reading`, received {first[:100]!r}")
    if state and state[1] != "activated":
        raise ValueError(f"the power reading is {state[1][:40]}")
    watts = parse_watts(found[1])
    if not watts:  # of a controller without a power meter, or that has just started
        raise ValueError("expected the power of a running machine, received 0 watts")
    return Reading(watts)


CSV_REMEDY = "the first line is `time,watts`, a row `1769860800.0,212.5` or `2026-01-31T12:00:00Z,212.5`"


def parse_meter(lines: Iterable[str]) -> Iterator[tuple[float, float]]:
    """Yield Unix time and watts of each row of a meter's CSV file; raises ValueError with the line.

    The meter may be writing the last line: it is left out when it is no row.
    """
    rows = csv.DictReader(lines, restval="")
    rows.fieldnames = [name.strip().lower() for name in rows.fieldnames or ()]
    if not {"time", "watts"} <= {*rows.fieldnames}:
        raise ValueError(f"expected columns `time` and `watts`, received {','.join(rows.fieldnames)[:100]!r}")
    failed = ""
    for row in rows:
        if failed:
            raise ValueError(failed)
        try:
            yield _parse_time(row["time"].strip()), parse_watts(row["watts"])
        except ValueError as error:
            failed = f"line {rows.line_num}: {error}"


def _parse_time(text: str) -> float:
    """Return the Unix time of a number or an ISO 8601 time, which is UTC without an offset."""
    try:
        return parse_number(text, "a time")
    except ValueError:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True)
class ScriptSource:
    """A source that a shell script on the machine reads; `parse` raises ValueError.

    $1 of the script is the path of a source that has one, else that of sysfs.
    """

    script: str
    parse: Callable[[str], Reading]
    remedy: str


SCRIPTS: dict[str, ScriptSource] = {
    "rapl": ScriptSource(RAPL_SCRIPT, parse_rapl, RAPL_REMEDY),
    "hwmon": ScriptSource(HWMON_SCRIPT, parse_hwmon, HWMON_REMEDY),
    "ipmi": ScriptSource(IPMI_SCRIPT, parse_dcmi, IPMI_REMEDY),
}
REMEDIES = {name: source.remedy for name, source in SCRIPTS.items()} | {"csv": CSV_REMEDY}


def build_loop(source: ScriptSource, argument: str) -> list[str]:
    """Build the command that prints a line every second: PREFIX, the machine's time, and the script's output.

    Tabs separate the lines of the output. The command ends when nobody reads it any more.
    """
    loop = f"""\
LC_ALL=C; export LC_ALL
while read -r uptime rest </proc/uptime && printf '{PREFIX}%s %s\\n' "$uptime" "$({{
{source.script}
}} | tr '\\n' '\\t')"; do
sleep 1 || exit
done"""
    return ["sh", "-c", loop, "csdctl-power", argument]


PATIENCE_S = 5.0
"""Maximum wait for a reading before the sampler checks whether the run has ended."""
RETRY_S = 15.0
"""The pause after a failure."""


class PowerSampler:
    """Samples from `__enter__` to `__exit__`; nothing that goes wrong here reaches the run."""

    def __init__(self, run: RunDirectory, fleet: Fleet, sessions: Mapping[str, Session], say: Say) -> None:
        self._log, self._say = PowerLog(run), say
        powers = {name: power for name in sessions if (power := fleet.power_of(name))}
        self._recorders = [_Recorder(name, power) for name, power in powers.items()]
        self._sessions = sessions
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start_s = math.inf

    def __enter__(self) -> Self:
        for recorder in self._recorders:
            if recorder.power.source == "csv":  # reports a wrong file before the training, records no row
                self._guard(recorder, self._import_meter)
            elif recorder.power.source != "constant":
                thread = threading.Thread(target=self._sample, args=(recorder,), daemon=True)
                thread.start()
                self._threads.append(thread)
        self._start_s = time.time()
        return self

    def __exit__(self, *_: object) -> None:
        for recorder in self._recorders:
            if recorder.power.source == "csv":
                self._guard(recorder, self._import_meter)
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        end_s = time.time()
        for recorder in self._recorders:
            if recorder.power.source == "constant":
                seconds = end_s - self._start_s
                self._write(recorder, end_s, Spent(seconds, (recorder.power.watts or 0.0) * seconds))

    def _sample(self, recorder: "_Recorder") -> None:
        while not self._stopped.is_set():
            self._guard(recorder, self._follow_loop)
            self._stopped.wait(RETRY_S)

    def _guard(self, recorder: "_Recorder", sample: "Callable[[_Recorder], None]") -> None:
        """Call `sample`; record why it ended, if it is not the end of the run, and say so once."""
        power = recorder.power
        try:
            sample(recorder)
        except (CsdctlError, OSError, ValueError, EOFError, RuntimeError, csv.Error) as error:
            if not self._stopped.is_set():
                text = shorten(make_printable(str(error) or type(error).__name__), 200)
                if not recorder.has_failed:
                    self._write(recorder, time.time(), Spent(0.0, None), text)
                recorder.has_failed = True
                if not recorder.was_failure_said:
                    recorder.was_failure_said = True
                    self._say(f"{recorder.name}: power cannot be read ({power.source}): {text}")
                    self._say(f"  {REMEDIES[power.source]}")
        self._write_rest(recorder)

    def _follow_loop(self, recorder: "_Recorder") -> None:
        source = SCRIPTS[recorder.power.source]
        command = build_loop(source, recorder.power.path or SYSFS)
        with closing(self._sessions[recorder.name].converse(command)) as conversation:
            while not self._stopped.is_set():
                try:
                    line = conversation.read_line(deadline_s=PATIENCE_S)
                except DeadlineError:
                    continue
                if line.startswith(PREFIX):
                    time_s, _, output = line.removeprefix(PREFIX).partition(" ")
                    reading = source.parse(output.replace("\t", "\n"))
                    self._take(recorder, parse_number(time_s, "a time"), reading)

    def _import_meter(self, recorder: "_Recorder") -> None:
        """Record the rows that a power meter has written during the run."""
        now_s = time.time()
        with open(recorder.power.path, encoding="utf-8", errors="replace", newline="") as file:
            rows = [row for row in parse_meter(file) if self._start_s - MAX_POWER_GAP_S <= row[0] <= now_s]
        if rows and now_s - rows[-1][0] <= MAX_POWER_GAP_S:  # the meter's next row is still to come
            rows.append((now_s, rows[-1][1]))
        for time_s, watts in rows:
            if spent := recorder.meter.add(time_s, Reading(watts)):
                self._write(recorder, time_s, spent)

    def _take(self, recorder: "_Recorder", machine_time_s: float, reading: Reading) -> None:
        recorder.until_s = time.time()
        if recorder.has_failed and not recorder.was_recovery_said:
            recorder.was_recovery_said = True
            self._say(f"{recorder.name}: power can be read again ({recorder.power.source})")
        recorder.has_failed = False
        spent = recorder.meter.add(machine_time_s, reading)
        if spent is None:
            return
        if spent.joules is None:
            self._write_rest(recorder)
            self._write(recorder, recorder.until_s, spent)
            return
        recorder.seconds += spent.seconds
        recorder.joules += spent.joules
        if recorder.seconds >= 5.0:  # so that a day of 36 nodes is no gigabyte
            self._write_rest(recorder)

    def _write_rest(self, recorder: "_Recorder") -> None:
        if recorder.seconds:
            self._write(recorder, recorder.until_s, Spent(recorder.seconds, recorder.joules))
            recorder.seconds = recorder.joules = 0.0

    def _write(self, recorder: "_Recorder", time_s: float, spent: Spent, error: str = "") -> None:
        power = recorder.power
        record = PowerRecord(
            time=round(time_s, 3),
            machine=recorder.name,
            source=power.source,
            origin=STATED if power.source == "constant" else MEASURED,
            seconds=round(spent.seconds, 3),
            joules=None if spent.joules is None else round(spent.joules, 6),
            idle_watts=power.idle_watts,
            includes_nodes=power.includes_nodes,
            error=error,
        )
        try:
            self._log.append(record)
        except OSError as problem:
            self._stopped.set()
            self._say(f"energy is no longer recorded: {problem}")


class _Recorder:
    """The energy of one machine since its latest record."""

    def __init__(self, name: str, power: PowerSource) -> None:
        self.name, self.power = name, power
        self.meter = EnergyMeter()
        self.seconds = self.joules = 0.0
        self.until_s = 0.0
        """When the latest reading arrived, in Unix time."""
        self.has_failed = False
        """Whether it has failed since the latest reading."""
        self.was_failure_said = self.was_recovery_said = False
