"""What a power source says at one moment, and energy from one moment to the next; pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

MAX_WATTS = 20_000.0
"""More than any machine takes: a larger power is a damaged reading, or a counter that has started again."""
MAX_POWER_GAP_S = 10.0
"""Between two readings of a power that are further apart, nobody knows what it was."""


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


def parse_watts(text: str, what: str = "watts") -> float:
    """Return a power; raises ValueError for one that no machine has."""
    watts = parse_number(text, what)
    if watts > MAX_WATTS:
        raise ValueError(f"expected {what} up to {MAX_WATTS:,.0f}, received {text[:40]!r}")
    return watts


def parse_machine_watts(text: str, what: str = "watts") -> float:
    """Return the power of a whole machine; raises ValueError for none at all, which no machine runs on.

    Controllers without a power meter, or that have just started, report 0.
    """
    watts = parse_watts(text, what)
    if not watts:
        raise ValueError(f"expected {what} of a machine that runs, received 0 watts")
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
"""Of one package or memory channel; bounds how long a counter with a range may go unread."""
