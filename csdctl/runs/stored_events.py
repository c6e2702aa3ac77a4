"""The events of a run as they were stored: read one by one, since a run of days has millions of them."""

import contextlib
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from csdctl.documents import open_regular
from csdctl.errors import InputError
from csdctl.worker.protocol.events import Event, check_event, event_from_document
from csdctl.worker.protocol.json_codec import (
    ProtocolError,
    compute_check,
    parse_json,
    read_check,
    without_surrogates,
)

EVENTS_LOST = "events lost"
"""The reason of a run whose csdctl recorded that it completed, although its events do not show that."""
MAX_LINE_BYTES = 4 << 20
"""More than any event."""
CHUNK_BYTES, MAX_DROPPED_BYTES, CHECKED_BYTES = 1 << 18, 256 << 20, 256
_OF_OTHERS = re.compile(rb'\{"time":[\d.]+,"event":"Progress","rank":[1-9]')
"""The beginning of a line with progress of a rank other than 0, as `EventLog` writes it."""


def first_check(run_id: str) -> int:
    """Return the number that the chain of a run's events begins with.

    Each line has a checksum, begun with the one before: lines that are lost, repeated, moved or changed break
    this chain. Earlier versions wrote none.
    """
    return zlib.crc32(os.fsencode(run_id))


def find_last_check(file: BinaryIO, first: int = 0) -> int:
    """Return the number with which the checksum of the next line in `file` begins.

    `first` if the file is empty, 0 after a line without a checksum, after which `ChainedLines` expects any.
    """
    size = os.fstat(file.fileno()).st_size
    last = os.pread(file.fileno(), 64, max(0, size - 64)).rstrip(b"\n")
    return read_check(last) or (0 if last else first)


@dataclass
class ChainedLines:
    """Lines with checksums, each begun with the one before."""

    lines: Iterable[bytes] = ()
    before: int | None = None
    """The number with which the first checksum begins. None: any."""
    num_breaks: int = 0
    """Places where lines are lost, repeated, moved or changed."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines."""
        before = self.before
        for line in self.lines:
            check = read_check(line)
            if before is not None and check is not None and check != compute_check(line, before):
                self.num_breaks += 1
            before = check  # after a line without, such as one that was cut, any may follow
            yield line


class StoredEvents:
    """The events in a file, in order of arrival. Every iteration reads the file from its beginning.

    A line that is no event of the run (truncated by a crash, damaged, foreign) is left out and counted.
    """

    num_unreadable = 0
    """Lines that the latest iteration has left out so far."""

    def __init__(self, path: Path, nodes: Sequence[str], run_id: str, *, is_cut: bool = False) -> None:
        """`is_cut`: the file had more lines."""
        self._path, self._nodes, self._first, self._is_cut = path, nodes, first_check(run_id), is_cut
        self._chained = ChainedLines()

    @property
    def num_breaks(self) -> int:
        """Places where lines are lost, repeated, changed or of another run, in the latest iteration."""
        return self._chained.num_breaks + self._is_cut

    def __iter__(self) -> Iterator[Event]:
        """Iterate over all events, without their times."""
        return (event for _, event in self.with_times())

    def with_times(self) -> Iterator[tuple[float, Event]]:
        """Yield the Unix time of arrival and the event. Raises InputError when there is no file."""
        if not os.path.lexists(self._path):
            problem = f"run {self._path.parent.name} has no events: {self._path} does not exist"
            raise InputError(problem, remedy="restore it: only a run that ended before training has none")
        yield from self._read(read_lines(self._path))

    def skim(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[float, Event]]:
        """Yield as `with_times` between two ends of lines, without progress of ranks other than 0."""
        lines = self._check(read_lines(self._path, start, stop), is_from_start=not start)
        yield from self._parse(line for line in lines if not _OF_OTHERS.match(line))

    def follow(self, is_over: Callable[[], bool], interval_s: float) -> Iterator[tuple[float, Event]]:
        """Yield all events, and those that are added, until `is_over`. Waits for a file that is not there."""
        return self._read(_lines(self._added(is_over, interval_s), self._path))

    def _added(self, is_over: Callable[[], bool], interval_s: float) -> Iterator[bytes]:
        position = 0
        while True:
            was_over, part = is_over(), b""
            with contextlib.suppress(FileNotFoundError), open_regular(self._path) as file:
                file.seek(position)
                part = file.read(CHUNK_BYTES)
            position += len(part)
            if part:
                yield part
            elif was_over:
                return
            else:
                time.sleep(interval_s)

    def _read(self, lines: Iterator[bytes]) -> Iterator[tuple[float, Event]]:
        return self._parse(self._check(lines))

    def _check(self, lines: Iterator[bytes], *, is_from_start: bool = True) -> Iterator[bytes]:
        self._chained = ChainedLines(lines, self._first if is_from_start else None)
        return iter(self._chained)

    def _parse(self, lines: Iterator[bytes]) -> Iterator[tuple[float, Event]]:
        self.num_unreadable = 0
        for line in lines:
            try:
                time_s, content = _parse(line)
                event = event_from_document(content)
                check_event(event, self._nodes)
            except ProtocolError:
                self.num_unreadable += 1
                continue
            yield time_s, event


def _parse(line: bytes) -> tuple[float, dict[str, Any]]:
    try:
        content = from_json(line)  # three times as fast as the standard library
    except ValueError:  # also for half of a character, which text from a node may name
        content = without_surrogates(parse_json(line.decode(errors="replace")))
    time_s = None
    if isinstance(content, dict):
        time_s = content.pop("time", None)
        content.pop("check", None)
    if not isinstance(time_s, float | int) or not 0 <= time_s < 1e11:  # in the year 5138
        raise ProtocolError("expected a time and an event")
    return time_s, content


def read_lines(path: Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, if there is one. Raises InputError if it cannot be read or has no lines."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        file.seek(start)
        stop = sys.maxsize if stop is None else stop
        yield from _lines(iter(lambda: file.read(max(0, min(CHUNK_BYTES, stop - file.tell()))), b""), path)


def find_end(path: Path, stop: int = sys.maxsize) -> tuple[int, int]:
    """Return where the last whole line before byte `stop` ends, and a checksum of the bytes before that."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        stop = min(file.seek(0, os.SEEK_END), stop)
        start = file.seek(max(0, stop - MAX_LINE_BYTES))
        content = file.read(stop - start)
        num_bytes = content.rfind(b"\n") + 1
        return start + num_bytes, zlib.crc32(content[max(0, num_bytes - CHECKED_BYTES) : num_bytes])
    return 0, 0


def _lines(parts: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of `path`, without their ends. An empty one for each longer than MAX_LINE_BYTES."""
    pending, num_dropped = b"", 0
    for chunk in parts:
        *lines, unfinished = (pending + chunk).split(b"\n")
        if num_dropped and lines:
            lines[0], num_dropped = b"", 0
        yield from lines
        is_too_long = num_dropped or len(unfinished) > MAX_LINE_BYTES
        pending, num_dropped = (b"", num_dropped + len(unfinished)) if is_too_long else (unfinished, 0)
        if num_dropped > MAX_DROPPED_BYTES:  # of a file that has terabytes of NULs
            raise InputError(
                f"cannot read {path}: no end of a line in {num_dropped:,} bytes", remedy="remove it"
            )
    if pending or num_dropped:
        yield pending
