"""The ledger: all bytes sent by csdctl and MPI, by link and traffic class.

At the end of a command, `ledger.jsonl` gets one line for each link, direction and traffic class. Bytes are
TCP payload, including encryption, without TCP and IP headers.
"""

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory
from csdctl.worker.protocol.json_codec import Count, ProtocolError, from_json

MAX_LINE_CHARS = 1 << 16


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

    def save(self) -> None:
        """Append the collected counts to the file; raises OSError."""
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

    def record(sent: Mapping[tuple[str, str, str], int]) -> None:
        ledger = Ledger(ProjectDirectory(directory).ledger, command)
        ledger.add(sent)
        ledger.save()

    return record


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield all entries in order; raises InputError for a damaged line."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_CHARS)
            if not line:
                return
            try:
                yield from_json(LedgerEntry, line)
            except ProtocolError as error:
                raise InputError(f"{path}:{number} is not a valid ledger entry: {error}") from None
