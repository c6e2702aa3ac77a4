"""All facts about one machine over an open session: one round trip for the probes, three for its clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from csdctl.errors import RemoteCommandError
from csdctl.fleet.facts import Facts
from csdctl.probes import cpu, nvme, resources, software
from csdctl.probes.probe import build_command, parse_outputs
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
MAX_CLOCK_OFFSET_S = 60.0
"""Clocks further apart than this get a note: logs no longer fit together, certificates may be refused."""

CLOCK_COMMAND = ("date", "+%s.%N")


@dataclass(frozen=True)
class ClockTrip:
    """One question for the time: when it was sent and answered here, and what was answered."""

    sent_s: float
    round_trip_s: float
    output: str


def collect_machine_facts(session: Session, python: str) -> Facts:
    """What the machine behind `session` is; raises RemoteCommandError, DeadlineError or UnreachableError."""
    completed = session.run(build_command(PROBES, python), deadline_s=PROBE_DEADLINE_S)
    completed.check(session.name, doing="probing", remedy="try `sh -c true` there by hand")
    trips = [measure_clock_trip(session, PROBE_DEADLINE_S) for _ in range(NUM_CLOCK_TRIPS)]
    return parse_facts(session.name, completed.output, trips)


def parse_facts(name: str, output: str, trips: Sequence[ClockTrip]) -> Facts:
    """The facts of machine `name` from what its probes printed; pure."""
    values, notes = parse_outputs(PROBES, output, name)
    notes += values.pop("notes", ())  # type: ignore[arg-type]
    cores, limit = values.get("num_cores"), values.get("cpu_limit")
    if isinstance(cores, int) and isinstance(limit, float) and limit >= cores:
        values["cpu_limit"] = None  # leaves all of the machine
    quickest = min(trips, key=lambda trip: trip.round_trip_s)
    values["round_trip_s"] = quickest.round_trip_s
    try:
        offset_s = values["clock_offset_s"] = parse_clock_offset(quickest)
        if abs(offset_s) > MAX_CLOCK_OFFSET_S:
            notes.append(f"its clock is {offset_s:+.0f} s off the host's: set it")
    except ValueError as error:
        notes.append(f"clock could not be told: {error}")
    return Facts(name=name, notes=tuple(notes), **values)  # type: ignore[arg-type]


def parse_clock_offset(trip: ClockTrip) -> float:
    """Seconds by which the machine's clock is ahead of ours; raises ValueError.

    Exact to half a round trip, or to half a second where `date` knows no nanoseconds (BusyBox).
    """
    seconds, _, fraction = trip.output.strip().partition(".")
    if not seconds.isdigit():
        raise ValueError(f"`date +%s.%N` printed {trip.output.strip()!r}")
    there_s = int(seconds) + (float(f"0.{fraction}") if fraction.isdigit() else 0.5)
    return there_s - (trip.sent_s + trip.round_trip_s / 2)


def measure_clock_trip(session: Session, deadline_s: float) -> ClockTrip:
    """Ask once; raises RemoteCommandError, DeadlineError or UnreachableError."""
    sent_s, started_s = time.time(), time.perf_counter()
    completed = session.run(CLOCK_COMMAND, deadline_s=deadline_s)
    round_trip_s = time.perf_counter() - started_s
    if completed.exit_code != 0:
        raise RemoteCommandError(f"`date` failed: {completed.last_error_line}", node=session.name)
    return ClockTrip(sent_s, round_trip_s, completed.output)
