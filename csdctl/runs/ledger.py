"""What commands have used, as JSON lines: bytes in ledger.jsonl, energy in power.jsonl of each run.

At the end of a command, `ledger.jsonl` gets one line for each link, direction and traffic class, with the
bytes that csdctl and MPI have sent: TCP payload, including encryption, without TCP and IP headers.
`power.jsonl` has the energy of each machine in short intervals.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.worker.protocol.json_codec import Between, Count, ProtocolError, Seconds, ShortText, from_json

MEASURED, STATED = "measured", "stated"


@dataclass(frozen=True)
class LedgerEntry:
    """Bytes of one traffic class that one machine sent to another during one command."""

    time: float
    """Unix time of the command's end."""
    command: str
    run: str
    """The run they belong to; '' for commands without a run."""
    sender: str
    receiver: str
    kind: str
    """A `TrafficClass`."""
    num_bytes: Count


class Ledger:
    """Collects the byte counts of one command and saves them at its end."""

    def __init__(self, path: Path, command: str) -> None:
        self._path = path
        self._command = command
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self.run = ""
        """The run of the command, once it is known."""

    def add(self, num_bytes: Mapping[tuple[str, str, str], int]) -> None:
        """Add bytes by sender, receiver and traffic class."""
        self._bytes.update(num_bytes)

    def save(self, num_bytes: Mapping[tuple[str, str, str], int] = {}) -> None:
        """Append the collected counts, and `num_bytes`, to the file; raises OSError."""
        self.add(num_bytes)
        now = round(time.time(), 3)
        lines = [
            json.dumps(asdict(LedgerEntry(now, self._command, self.run, *key, count))) + "\n"
            for key, count in sorted(self._bytes.items())
            if count
        ]
        self._bytes.clear()
        if lines:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def record_traffic(directory: Path, command: str) -> Callable[[Mapping[tuple[str, str, str], int]], None]:
    """Return a callback that records the bytes of a command's connections when they are closed."""
    return lambda sent: Ledger(ProjectDirectory(directory).ledger, command).save(sent)


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield all entries in order; raises InputError for a damaged line."""
    for number, line in _lines(path):
        try:
            yield from_json(LedgerEntry, line)
        except ProtocolError as error:
            raise InputError(f"{path}:{number} is not a valid ledger entry: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, in parts if they are too long; none without the file."""
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
        yield from enumerate(iter(partial(file.readline, 1 << 16), ""), 1)


@dataclass(frozen=True)
class PowerRecord:
    """`seconds` that ended at `time`; without `joules`: the `error` of a source."""

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
    """Write a record in one piece, as many threads do; raises OSError."""
    with run.power.open("a", encoding="utf-8") as file:
        file.write(json.dumps(vars(record)) + "\n")


def read_power(run: RunDirectory) -> Iterator[PowerRecord]:
    """Yield the records of a run; lines that are none, such as one cut off, are left out."""
    for _, line in _lines(run.power):
        with contextlib.suppress(ProtocolError):
            yield from_json(PowerRecord, line)
