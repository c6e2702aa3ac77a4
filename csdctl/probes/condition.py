"""Probes of preflight checks, in the same round trip as facts: hostname, addresses, a test write."""

import re
from collections.abc import Sequence

from csdctl.fleet.facts import Condition, DirectorySpace, Facts
from csdctl.fleet.network import parse_local_addresses
from csdctl.notify import shorten
from csdctl.probes.imports import imports_probe
from csdctl.probes.machine import NUM_CLOCK_TRIPS, PROBES, measure_clock_trip, parse_facts
from csdctl.probes.probe import MAX_NOTE, FactProbe, FactValues, build_command, build_known, parse_outputs
from csdctl.transport.session import Session

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


def collect_condition(
    session: Session, python: str, *, deadline_s: float, modules: Sequence[str] = ()
) -> tuple[Facts, Condition]:
    """Measure facts and condition of the machine of `session`; look for `modules` in its Python.

    Raises RemoteCommandError, DeadlineError or UnreachableError.
    """
    probes = (*CONDITION_PROBES, *([imports_probe(modules)] if modules else []))
    completed = session.run(build_command((*PROBES, *probes), python), deadline_s=deadline_s)
    completed.check(session.name, doing="probing", remedy="run `sh -c true` there manually")
    trips = [measure_clock_trip(session, deadline_s) for _ in range(NUM_CLOCK_TRIPS)]
    facts = parse_facts(session.name, completed.output, trips)
    return facts, parse_condition(session.name, completed.output, probes)


def parse_condition(name: str, output: str, probes: Sequence[FactProbe] | None = None) -> Condition:
    """Parse the condition of machine `name` from the output of `probes` (default: all); pure."""
    values, _ = parse_outputs(probes or CONDITION_PROBES, output, name)
    condition, _ = build_known(Condition, name, values)
    return condition


def parse_hostname(output: str) -> FactValues:
    """Parse /proc/sys/kernel/hostname."""
    return {"hostname": output.strip() or None}


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
    return {"home": home, "temporary": temporary}


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


CONDITION_PROBES = (
    FactProbe("hostname", "cat /proc/sys/kernel/hostname", parse_hostname),
    FactProbe("addresses", "cat /proc/net/fib_trie", parse_addresses),
    FactProbe("open files", "ulimit -H -n", parse_open_files),
    FactProbe("places", _PLACES_SCRIPT, parse_places),
)
