"""Collect facts and the condition of one machine over an open session.

One round trip for all facts, three for the clock.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import ValidationError

from csdctl.errors import RemoteCommandError
from csdctl.facts.fact import MAX_NOTE, Fact, FactValues, build_command, parse_outputs, text_fact
from csdctl.facts.hardware import HARDWARE_FACTS
from csdctl.facts.software import SOFTWARE_FACTS
from csdctl.fleet.facts import MAX_SHOWN, Condition, DirectorySpace, Facts, list_invalid
from csdctl.fleet.network import parse_local_addresses
from csdctl.notify import shorten
from csdctl.transport.session import Session

MACHINE_FACTS = (*HARDWARE_FACTS, *SOFTWARE_FACTS)

FACTS_DEADLINE_S = 60.0
NUM_CLOCK_TRIPS = 3
MAX_CLOCK_OUTPUT = 40
MAX_CLOCK_OFFSET_S = 60.0
"""A larger offset gets a note: logs cannot be correlated, certificates may be rejected."""

FactsT = TypeVar("FactsT", bound=Facts)

CLOCK_COMMAND = ("date", "+%s.%N")


@dataclass(frozen=True)
class ClockTrip:
    """One clock request: local send time, round trip time, and response."""

    sent_s: float
    round_trip_s: float
    output: str


def collect_facts(session: Session, python: str) -> Facts:
    """Return the facts of the machine of `session`.

    Raises RemoteCommandError, DeadlineError or UnreachableError.
    """
    return _collect(session, python, MACHINE_FACTS, Facts, FACTS_DEADLINE_S)


def collect_condition(session: Session, python: str, *, deadline_s: float) -> Condition:
    """Return the condition of the machine of `session`; raises what `collect_facts` raises."""
    return _collect(session, python, CONDITION_FACTS, Condition, deadline_s)


def _collect(
    session: Session, python: str, facts: Sequence[Fact], kind: type[FactsT], deadline_s: float
) -> FactsT:
    completed = session.run(build_command(facts, python), deadline_s=deadline_s)
    completed.check(session.name, doing="probing", remedy="run `sh -c true` there manually")
    trips = [measure_clock_trip(session, deadline_s) for _ in range(NUM_CLOCK_TRIPS)]
    return parse_facts(session.name, completed.output, trips, facts, kind)


def parse_facts(
    name: str, output: str, trips: Sequence[ClockTrip], facts: Sequence[Fact], kind: type[FactsT]
) -> FactsT:
    """Parse machine `name` from the output of `facts`, without the values that `kind` does not allow; pure.

    What is unknown or ignored has a note.
    """
    values, notes = parse_outputs(facts, output, name)
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
    try:
        known = kind(name, **values)  # type: ignore[arg-type]
    except ValidationError as error:
        invalid = list_invalid(error)
        notes += [f"ignored: {reason}" for reason in invalid.values()]
        known = kind(name, **{key: value for key, value in values.items() if key not in invalid})  # type: ignore[arg-type]
    return replace(known, notes=tuple(notes))


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


# Free space alone does not reveal quotas, read-only file systems and missing permissions. Other users may
# write to TMPDIR: in a new directory with a random name, nothing is written through a link of theirs.
_PLACES_SCRIPT = """\
for place in "$PWD" "${TMPDIR:-/tmp}"; do
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


def parse_addresses(output: str) -> FactValues:
    """Parse /proc/net/fib_trie."""
    if "LOCAL" not in output:
        raise ValueError("/proc/net/fib_trie lists no address")
    return {"addresses": tuple(parse_local_addresses(output))}


def parse_open_files(output: str) -> FactValues:
    """Parse `ulimit -H -n`; `unlimited` and invalid output become None."""
    return {"open_files": int(output) if output.strip().isdigit() else None}


def parse_places(output: str) -> FactValues:
    """Parse the script's output for the home directory and TMPDIR, in this order."""
    texts = re.split(r"^place ", output, flags=re.MULTILINE)[1:]
    if len(texts) != 2:
        raise ValueError(f"expected two directories, received {output[:80]!r}")
    home, temporary = map(_parse_space, texts)
    return {"home_space": home, "temporary_space": temporary}


def _parse_space(text: str) -> DirectorySpace:
    path, *lines = text.splitlines()
    values = dict(line.partition(" ")[::2] for line in lines if " " in line)
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
    text_fact("hostname", "cat /proc/sys/kernel/hostname", "hostname"),
    Fact("addresses", "cat /proc/net/fib_trie", parse_addresses),
    Fact("open files", "ulimit -H -n", parse_open_files),
    Fact("places", _PLACES_SCRIPT, parse_places),
)
