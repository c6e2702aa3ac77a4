"""Reads the power of all machines during a run, once per second, and writes power.jsonl.

A source is a shell command that prints powers or energy counters. A loop on the machine runs it, over the
session that is open anyway, and a thread of the host adds up what it prints. A source that fails or falls
silent is reported once and tried again, its machine has no energy for that time, and the run goes on.
"""

import math
import re
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Self

from csdctl.errors import CsdctlError, DeadlineError
from csdctl.fleet.model import HOST_NAME, Fleet, PowerSource
from csdctl.notify import Say, make_printable, shorten
from csdctl.runs.directory import RunDirectory
from csdctl.runs.ledger import MEASURED, STATED, PowerRecord, append_power
from csdctl.transport.session import Session
from csdctl.worker.protocol.durable_files import sync

MAX_WATTS = 20_000.0
"""More than any machine takes: a larger power is a damaged reading, or a counter that was set back."""
MAX_GAP_S = 10.0
"""Maximum time between two readings; if it is longer, the energy is unknown."""
RECORD_S = 5.0
"""The time of one record: the records of 36 nodes in a day stay far below a gigabyte."""
RETRY_S = 15.0
"""The pause after a failure."""

# Prints a line every second: the machine's time, and what the command has printed. Ends with its input, so
# that it does not outlive csdctl.
LOOP = """\
machine=$2
while :; do
output=$( (eval "$1") 2>&1 || echo "(exit code $?)")
read -r uptime rest </proc/uptime
set -f; printf '%s ' "$uptime" $output || exit; set +f; echo
sleep 1
done &
cat >/dev/null"""

# Energy counters of processor packages and memory, Documentation/power/powercap/powercap.rst of Linux:
# `energy_uj` counts microjoules and starts again at 0 after `max_energy_range_uj`. Packages contain their
# cores; memory (`dram`) is counted apart. `psys`, the whole board of some laptops, contains both.
RAPL = """\
for zone in /sys/class/powercap/intel-rapl:*; do
  read -r name <"$zone/name" || continue
  case $name in package-*|dram) ;; *) continue ;; esac
  if read -r energy <"$zone/energy_uj" && read -r range <"$zone/max_energy_range_uj"
  then echo "$energy/$range uJ"
  else echo "$zone/energy_uj cannot be read"
  fi
done 2>/dev/null"""
RAPL_REMEDY = (
    "only root may read energy_uj (CVE-2020-8694), unless a udev rule allows it: on nodes, "
    "`csdctl provision --set node_rapl=true` writes it, for others see docs/how-to/energy.md"
)
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
_VALUE = re.compile(rf"(?<!\S){_NUMBER}(?:(?:/{_NUMBER})? ?(u?J)| ?(u?W)|)(?: |$)", re.ASCII)


@dataclass(frozen=True)
class Reading:
    """A power, or energy counters."""

    watts: float
    counters: tuple[tuple[float, float], ...]
    """Joules of each counter, and the value at which it starts again at 0."""


def parse_reading(text: str) -> Reading:
    """Return the sum of the powers, or the counters, in `text`. Raises ValueError."""
    text = " ".join(text.split())
    powers: list[float] = []
    counters: list[tuple[float, float]] = []
    for number, limit, joule_unit, watt_unit in _VALUE.findall(text):
        scale = 1e-6 if (joule_unit or watt_unit).startswith("u") else 1.0
        if joule_unit:
            counters.append((float(number) * scale, float(limit or 0) * scale or math.inf))
        else:
            powers.append(float(number) * scale)
    is_possible = not powers if counters else 0 < sum(powers) <= MAX_WATTS
    if _VALUE.sub("", text) or not is_possible:
        raise ValueError(
            f"expected a power of up to {MAX_WATTS:,.0f} W or an energy, such as `212.5 W` or `3600 J`, "
            f"received {text[:100]!r}"
        )
    return Reading(sum(powers), tuple(counters))


def count_joules(before: Reading, now: Reading, seconds: float) -> float:
    """Return the energy between two readings. Raises ValueError where it cannot be known."""
    if seconds > MAX_GAP_S or len(before.counters) != len(now.counters):
        raise ValueError(
            f"expected {len(before.counters)} counters within {MAX_GAP_S:g} s, received {len(now.counters)} "
            f"after {seconds:.0f} s"
        )
    joules = (before.watts + now.watts) / 2 * seconds
    for (start, limit), (end, _) in zip(before.counters, now.counters, strict=True):
        joules += (end - start) % limit
    if not joules <= seconds * MAX_WATTS:
        raise ValueError(f"expected counters that grow, received a change of {joules:g} J in {seconds:.1f} s")
    return joules


class PowerSampler:
    """Samples from `__enter__` to `__exit__`. Nothing that goes wrong here reaches the run."""

    def __init__(self, run: RunDirectory, fleet: Fleet, sessions: Mapping[str, Session], say: Say) -> None:
        self._run, self._sessions, self._say = run, sessions, say
        self._powers = {name: power for name in sessions if (power := fleet.power_of(name))}
        self._threads = [
            threading.Thread(target=self._sample, args=(name, power), daemon=True)
            for name, power in self._powers.items()
            if power.watts is None
        ]
        self._failed: set[str] = set()
        self._stopped = threading.Event()
        self._start_s = 0.0

    def __enter__(self) -> Self:
        self._start_s = time.time()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        end_s = time.time()
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * MAX_GAP_S)
        for name, power in self._powers.items():
            if power.watts is not None:
                seconds = end_s - self._start_s
                self._record(name, end_s, seconds, power.watts * seconds)
        with suppress(OSError):  # nothing was recorded, or it was said that the disk is full
            sync(self._run.power)

    def _sample(self, name: str, power: PowerSource) -> None:
        """Follow the source until the run ends, and begin again after a failure, which is reported once."""
        while not self._stopped.is_set():
            try:
                self._follow(name, power)
            except (CsdctlError, OSError, ValueError, EOFError, RuntimeError) as error:
                if name not in self._failed:
                    self._failed.add(name)
                    text = shorten(make_printable(str(error) or type(error).__name__), 200)
                    self._record(name, time.time(), 0.0, None, text)
                    self._say(f"{name}: power cannot be read ({power.source}): {text}")
                    place = HOST_NAME if power.on_host else name
                    self._say(f"  {f'on {place}: {power.command}' if power.command else RAPL_REMEDY}")
            self._stopped.wait(RETRY_S)

    def _follow(self, name: str, power: PowerSource) -> None:
        """Record what the source prints until the run ends. Raises an error when the energy is unknown."""
        command = ["sh", "-c", LOOP, "csdctl-power", power.command or RAPL, name]
        before: Reading | None = None
        before_s = time_s = seconds = joules = 0.0
        with closing(self._sessions[HOST_NAME if power.on_host else name].converse(command)) as conversation:
            try:
                while not self._stopped.is_set():
                    uptime, _, text = conversation.read_line(deadline_s=MAX_GAP_S).partition(" ")
                    reading, now_s = parse_reading(text), float(uptime)
                    if before:
                        joules += count_joules(before, reading, now_s - before_s)
                        seconds += now_s - before_s
                    before, before_s, time_s = reading, now_s, time.time()
                    if seconds >= RECORD_S:
                        self._record(name, time_s, seconds, joules)
                        seconds = joules = 0.0
            except DeadlineError:
                raise ValueError(f"no reading for {MAX_GAP_S:g} s") from None
            finally:
                if seconds:
                    self._record(name, time_s, seconds, joules)

    def _record(
        self, name: str, time_s: float, seconds: float, joules: float | None, error: str = ""
    ) -> None:
        """Write the energy of `seconds` that ended at `time_s`, in Unix time."""
        power = self._powers[name]
        record = PowerRecord(
            time=round(time_s, 3),
            machine=name,
            source=power.source,
            origin=MEASURED if power.watts is None else STATED,
            seconds=round(seconds, 3),
            joules=None if joules is None else round(joules, 6),
            idle_watts=power.idle_watts,
            includes_nodes=power.includes_nodes,
            error=error,
        )
        try:
            append_power(self._run, record)
        except OSError as problem:
            self._stopped.set()
            self._say(f"energy is no longer recorded: {problem}")
