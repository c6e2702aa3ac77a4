"""Collect facts of one machine over an open session: one round trip for probes, three for the clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from csdctl.errors import RemoteCommandError
from csdctl.fleet.facts import MAX_SHOWN, Facts
from csdctl.probes import cpu, nvme, resources, software
from csdctl.probes.probe import build_command, build_known, parse_outputs
from csdctl.transport.session import Session

PROBES = (
    cpu.ARCHITECTURE,
    cpu.CPUINFO,
    resources.MEMORY,
    resources.LIMITS,
    resources.DISK,
    software.PYTHON,
    software.GLIBC,
    software.HOME,
    nvme.NVME,
)

PROBE_DEADLINE_S = 60.0
NUM_CLOCK_TRIPS = 3
MAX_CLOCK_OUTPUT = 40
MAX_CLOCK_OFFSET_S = 60.0
"""A larger offset gets a note: logs cannot be correlated, certificates may be rejected."""

CLOCK_COMMAND = ("date", "+%s.%N")


@dataclass(frozen=True)
class ClockTrip:
    """One clock request: local send time, round trip time, and response."""

    sent_s: float
    round_trip_s: float
    output: str


def collect_machine_facts(session: Session, python: str) -> Facts:
    """Return the facts of the machine of `session`.

    Raises RemoteCommandError, DeadlineError or UnreachableError.
    """
    completed = session.run(build_command(PROBES, python), deadline_s=PROBE_DEADLINE_S)
    completed.check(session.name, doing="probing", remedy="run `sh -c true` there manually")
    trips = [measure_clock_trip(session, PROBE_DEADLINE_S) for _ in range(NUM_CLOCK_TRIPS)]
    return parse_facts(session.name, completed.output, trips)


def parse_facts(name: str, output: str, trips: Sequence[ClockTrip]) -> Facts:
    """Parse the facts of machine `name` from the output of its probes; pure."""
    values, notes = parse_outputs(PROBES, output, name)
    notes += values.pop("notes", ())  # type: ignore[arg-type]
    cores, limit = values.get("num_cores"), values.get("cpu_limit")
    if isinstance(cores, int) and isinstance(limit, float) and limit >= cores:
        values["cpu_limit"] = None  # no effective limit
    quickest = min(trips, key=lambda trip: trip.round_trip_s)
    values["round_trip_s"] = quickest.round_trip_s
    try:
        offset_s = values["clock_offset_s"] = parse_clock_offset(quickest)
        if abs(offset_s) > MAX_CLOCK_OFFSET_S:
            notes.append(f"its clock differs from the host by {offset_s:+.0f} s: set it")
    except ValueError as error:
        notes.append(f"clock unknown: {error}")
    facts, ignored = build_known(Facts, name, values)
    return replace(facts, notes=(*notes, *ignored))


def parse_clock_offset(trip: ClockTrip) -> float:
    """Return the seconds by which the machine's clock is ahead of the host; raises ValueError.

    Exact to half a round trip, or to half a second if `date` has no nanoseconds (BusyBox).
    """
    seconds, _, fraction = trip.output.strip().partition(".")
    if not seconds.isdigit() or len(trip.output) > MAX_CLOCK_OUTPUT:
        raise ValueError(f"`date +%s.%N` printed {trip.output.strip()[:MAX_SHOWN]!r}")
    remote_s = int(seconds) + (float(f"0.{fraction}") if fraction.isdigit() else 0.5)
    return remote_s - (trip.sent_s + trip.round_trip_s / 2)


def measure_clock_trip(session: Session, deadline_s: float) -> ClockTrip:
    """Request the time once; raises RemoteCommandError, DeadlineError or UnreachableError."""
    sent_s, started_s = time.time(), time.perf_counter()
    completed = session.run(CLOCK_COMMAND, deadline_s=deadline_s)
    round_trip_s = time.perf_counter() - started_s
    if completed.exit_code != 0:
        raise RemoteCommandError(f"`date` failed: {completed.last_error_line}", node=session.name)
    return ClockTrip(sent_s, round_trip_s, completed.output)
