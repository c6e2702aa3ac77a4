"""power.jsonl of a run: the energy of each machine in short intervals, as JSON lines."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TextIO

from csdctl.runs.directory import RunDirectory
from csdctl.worker.protocol.json_codec import Between, ProtocolError, Seconds, ShortText, from_json

MEASURED, STATED = "measured", "stated"
MAX_LINE_CHARS = 1 << 14


@dataclass(frozen=True)
class PowerRecord:
    """`seconds` that ended at `time`. Without `joules`: a gap, with an `error` where one is known."""

    time: Annotated[float, Between(0.0, 1e11)]
    """Unix time."""
    machine: ShortText
    source: ShortText
    origin: ShortText
    """MEASURED or STATED."""
    seconds: Seconds
    joules: Seconds | None = None
    idle_watts: Seconds | None = None
    """Of the machine when nothing is trained, as stated in fleet.yaml."""
    includes_nodes: bool = False
    error: ShortText = ""


class PowerLog:
    """Appends records; opened with the first one, and used by many threads."""

    def __init__(self, run: RunDirectory) -> None:
        self._path, self._lock = run.power, threading.Lock()
        self._file: TextIO | None = None

    def append(self, record: PowerRecord) -> None:
        """Write a record; raises OSError."""
        content = {
            key: value
            for key, value in vars(record).items()
            if value is not None and value != "" and value is not False
        }
        line = json.dumps(content) + "\n"
        with self._lock:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def read_power(run: RunDirectory) -> Iterator[PowerRecord]:
    """Yield the records of a run; lines that are none, such as one cut off, are left out."""
    try:
        file = run.power.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE_CHARS):
            try:
                yield from_json(PowerRecord, line)
            except ProtocolError:
                continue
