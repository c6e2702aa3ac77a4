"""The events of a run as they were stored: read one by one, since a run of days has millions of them."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from csdctl.errors import InputError
from csdctl.runs.stored_progress import Spent, SpentReader, parse_progress
from csdctl.worker.protocol.events import Event, check_event, event_from_line
from csdctl.worker.protocol.json_codec import ProtocolError, parse_json

MAX_LINE_BYTES = 4 << 20
"""More than any event, with the quotes escaped."""
CHUNK_BYTES = 1 << 18
MAX_TIME_S = 1e11
"""In the year 5138; a date can say it."""


class StoredEvents:
    """The events in a file, in order of arrival; every iteration reads the file from its beginning.

    A line that is no event of the run (truncated by a crash, damaged, edited) is left out and counted.
    """

    def __init__(self, path: Path, nodes: Sequence[str]) -> None:
        """`nodes` are the machines of the run's ranks, in order."""
        self._path, self._nodes = path, nodes
        self.num_unreadable = 0
        """Lines that the latest iteration has left out so far."""

    def __iter__(self) -> Iterator[Event]:
        return (event for _, event in self.with_times())

    def with_times(self, on_spent: Callable[[Spent], None] | None = None) -> Iterator[tuple[float, Event]]:
        """Yield the Unix time of arrival and the event; raises InputError when there is no file.

        Progress of ranks other than 0, of which there are millions, goes to `on_spent` if it is given: to
        make an event of each takes four times as long.
        """
        self.num_unreadable = 0
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            raise InputError(
                f"run {self._path.parent.name} has no events", remedy="the run ended before training started"
            ) from None
        with file:
            yield from self._read(file, on_spent)

    def last(self, max_bytes: int) -> Iterator[tuple[float, Event]]:
        """Yield as `with_times`, only of the end of the file; nothing when there is no file."""
        self.num_unreadable = 0
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            if size > max_bytes:
                file.readline()  # the rest of a line
            yield from self._read(file)

    def follow(self, is_over: Callable[[], bool], interval_s: float = 0.25) -> Iterator[tuple[float, Event]]:
        """Yield all events, and those that are added, until `is_over`; waits for a file that is not there."""
        pending, position = b"", 0
        while True:
            was_over = is_over()
            chunk = b""
            with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
                file.seek(position)
                chunk = file.read(MAX_LINE_BYTES)
                position += len(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                with contextlib.suppress(ProtocolError):
                    yield self._parse(line.decode(errors="replace"))
            if not chunk:
                if was_over:
                    return
                time.sleep(interval_s)
            if len(pending) > MAX_LINE_BYTES:
                pending = b""

    def _read(
        self, file: BinaryIO, on_spent: Callable[[Spent], None] | None = None
    ) -> Iterator[tuple[float, Event]]:
        parse_spent = SpentReader(self._nodes).parse
        for line in _lines(file):
            if on_spent and (spent := parse_spent(line)) is not None:
                on_spent(spent)
                continue
            try:
                stored = self._parse(line.decode(errors="replace"))
            except ProtocolError:
                self.num_unreadable += 1
                continue
            yield stored

    def _parse(self, line: str) -> tuple[float, Event]:
        """Return what `EventLog` wrote as one line; raises ProtocolError for anything else."""
        if (progress := parse_progress(line, self._nodes)) is not None:
            return progress
        content = parse_json(line)
        if not isinstance(content, dict):
            raise ProtocolError("not an object")
        time_s, text = content.get("time"), content.get("line")
        if not isinstance(time_s, float | int) or not isinstance(text, str) or not 0 <= time_s < MAX_TIME_S:
            raise ProtocolError("not a time and an event")
        event = event_from_line(text)
        if event is None:
            raise ProtocolError("not an event")
        check_event(event, self._nodes)
        return time_s, event


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines, without their ends; an empty one for each that is longer than MAX_LINE_BYTES."""
    pending, is_too_long = b"", False
    while chunk := file.read(CHUNK_BYTES):
        *lines, rest = (pending + chunk).split(b"\n")
        if is_too_long and lines:
            lines[0], is_too_long = b"", False
        yield from lines
        is_too_long = is_too_long or len(rest) > MAX_LINE_BYTES
        pending = b"" if is_too_long else rest
    if pending or is_too_long:
        yield pending
