"""Resources that commands have used, as JSON lines: bytes in ledger.jsonl, energy in power.jsonl of each run.

Bytes are the TCP payload of csdctl and MPI, including encryption, without TCP and IP headers. Energy is that
of each machine in short intervals.
"""

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from csdctl.documents import append_lines, load_kept, open_log, save_json
from csdctl.errors import InputError
from csdctl.notify import Say, warn
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.stored_events import ChainedLines, find_last_check, read_lines
from csdctl.worker.protocol import json_codec
from csdctl.worker.protocol.disk_errors import describe_os_error
from csdctl.worker.protocol.json_codec import Between, Count, ProtocolError, Seconds, ShortText, from_json

MEASURED, STATED = "measured", "stated"


@dataclass(frozen=True)
class LedgerEntry:
    """Bytes of one traffic class that one machine sent to another during one command."""

    time: float
    """Unix time of the command's end."""
    command: str
    run: str
    """'' for commands without a run."""
    sender: str
    receiver: str
    kind: str
    """A `TrafficClass`."""
    num_bytes: Count


class Ledger:
    """Collects the byte counts of one command and saves them at its end."""

    def __init__(self, path: Path, command: str, say: Say = warn) -> None:
        """`say` tells of a last line that was cut, and that `save` has failed: no command ends for that."""
        self._path, self._say = path, say
        self._command = command
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self.run = ""

    def add(self, num_bytes: Mapping[tuple[str, str, str], int]) -> None:
        """Add bytes by sender, receiver and traffic class."""
        self._bytes.update(num_bytes)

    def save(self, num_bytes: Mapping[tuple[str, str, str], int] = {}) -> None:
        """Append the collected counts, and `num_bytes`, to the file."""
        self.add(num_bytes)
        now = round(time.time(), 3)
        entries = [
            LedgerEntry(now, self._command, self.run, *key, count)
            for key, count in sorted(self._bytes.items())
            if count
        ]
        self._bytes.clear()
        if entries:
            try:
                _append(self._path, entries, self._say)
            except (OSError, InputError) as error:
                what = describe_os_error(error, self._path)[0] if isinstance(error, OSError) else str(error)
                self._say(f"warning: what {self._command} has sent is not recorded: {what}")


def _append(path: Path, entries: Sequence[LedgerEntry], say: Say) -> None:
    """Append lines with a chain of checksums: lines that are lost or changed later are noticed."""
    lines = [json_codec.to_json(entry).encode() for entry in entries]
    with open_log(path, say, is_shared=True) as file:
        # After lines that are gone, the chain does not go on: a reader notices.
        check = find_last_check(file) + _has_lost_lines(path, os.fstat(file.fileno()).st_size)
        with contextlib.suppress(OSError):  # without a lock, others may append now: lines have no checksums
            fcntl.flock(file, fcntl.LOCK_EX)
            for place, line in enumerate(lines):
                lines[place], check = json_codec.add_check(line, check)
        append_lines(path, b"".join(line + b"\n" for line in lines))
        with contextlib.suppress(OSError):
            save_json(path.with_suffix(".json"), {"bytes": path.stat().st_size})


def _has_lost_lines(path: Path, size: int) -> bool:
    """Return whether a ledger had more bytes than `size` when it was written."""
    return size < (load_kept(path.with_suffix(".json"), dict[str, int]) or {}).get("bytes", 0)


def record_traffic(directory: Path, command: str) -> Callable[[Mapping[tuple[str, str, str], int]], None]:
    """Return a callback that records the bytes of a command's connections when they are closed."""
    return lambda sent: Ledger(ProjectDirectory(directory).ledger, command).save(sent)


def read_ledger(path: Path, say: Say = lambda line: None) -> Iterator[LedgerEntry]:
    """Yield all entries in order. `say` tells of the lines that are none, which are left out."""
    problem, num_damaged = "", 0
    lines = ChainedLines(read_lines(path), 0)
    try:
        for number, line in enumerate(lines, 1):
            try:
                yield from_json(LedgerEntry, json_codec.remove_check(line).decode(errors="replace"))
            except ProtocolError:
                num_damaged += 1
                problem = f"{path}: lines that cannot be read: {num_damaged:,}, the last is line {number:,}"
    except InputError as error:
        problem = error.message
    if problem:
        say(f"warning: {problem}; what it recorded is missing here")
    is_cut = _has_lost_lines(path, path.stat().st_size if path.exists() else 0)
    if num_breaks := lines.num_breaks + is_cut:
        what = f"lines are lost, repeated or changed, in places: {num_breaks:,}"
        say(f"warning: {path}: {what}; what left the machines is not known")


@dataclass(frozen=True)
class PowerRecord:
    """`seconds` that ended at `time`. Without `joules`: the `error` of a source."""

    time: Annotated[float, Between(0.0, 1e11)]
    """Unix time."""
    machine: ShortText
    source: ShortText
    origin: ShortText
    """MEASURED or STATED."""
    seconds: Seconds
    joules: Seconds | None = None
    idle_watts: Seconds | None = None
    """Power of the machine when nothing is trained, as stated in fleet.yaml."""
    includes_nodes: bool = False
    error: ShortText = ""


def append_power(run: RunDirectory, record: PowerRecord) -> None:
    """Write a record in one piece, as many threads do. `PowerSampler` syncs them. Raises OSError."""
    append_lines(run.power, json.dumps(vars(record)).encode() + b"\n", is_synced=False)


def read_power(run: RunDirectory) -> Iterator[PowerRecord]:
    """Yield the records of a run. Lines that are none, such as one cut off, are left out."""
    try:
        for line in read_lines(run.power):
            with contextlib.suppress(ProtocolError):
                yield from_json(PowerRecord, line.decode(errors="replace"))
    except InputError as error:
        warn(f"warning: {error.message}; the energy that it recorded is missing here")
