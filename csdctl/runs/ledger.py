"""The ledger: every byte that csdctl and MPI sent, by link and by what it was.

`ledger.jsonl` gets its lines when a command ends, one for each link, direction and kind. Bytes are the
payload of TCP connections, encryption included; TCP's and IP's own headers are not.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory


@dataclass(frozen=True)
class Entry:
    """Bytes of one kind that one machine sent to another within one command."""

    time: float
    """Unix time of the command's end."""
    command: str
    run: str
    """The run they belong to; '' for commands without one."""
    sender: str
    receiver: str
    kind: str
    num_bytes: int


class Ledger:
    """Takes in what one command sends, and writes it down at its end."""

    def __init__(self, path: Path, command: str) -> None:
        self._path = path
        self._command = command
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self.run = ""
        """The run that the command is about, once it is known."""

    def add(self, num_bytes: Mapping[tuple[str, str, str], int]) -> None:
        """Bytes by sender, receiver and kind."""
        self._bytes.update(num_bytes)

    def save(self) -> None:
        """Append what was taken in to the file; raises OSError."""
        now = round(time.time(), 3)
        lines = [
            json.dumps(asdict(Entry(now, self._command, self.run, *key, count))) + "\n"
            for key, count in sorted(self._bytes.items())
            if count
        ]
        self._bytes.clear()
        if lines:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def note_traffic(directory: Path, command: str) -> Callable[[Mapping[tuple[str, str, str], int]], None]:
    """For commands that end with their connections: returns what records the bytes these carried."""

    def note(sent: Mapping[tuple[str, str, str], int]) -> None:
        ledger = Ledger(ProjectDirectory(directory).ledger, command)
        ledger.add(sent)
        ledger.save()

    return note


def read_ledger(path: Path) -> Iterator[Entry]:
    """All entries, in order; raises InputError when a line is damaged."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}:{number} is no entry of a ledger: {error}") from None
