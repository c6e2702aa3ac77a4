"""The output of one mpirun: events go to a queue, all other lines to the log files."""

import contextlib
import queue
import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from csdctl.launch.diagnosis import is_noise
from csdctl.notify import make_printable
from csdctl.worker.protocol.events import Event, event_from_line
from csdctl.worker.protocol.json_codec import ProtocolError

LogPath = Callable[[int | None], Path]
"""The log file of a rank; with None, the log file of mpirun itself."""

MAX_LINE_BYTES = 1 << 16
MAX_TAIL_LINES = 60
_TAGGED = re.compile(rb"\[\d+,(\d+)\]<(stdout|stderr)>: ?(.*)", re.DOTALL)
"""A line that mpirun passes on from a rank (--output tag)."""


class MpiOutput:
    """Reads mpirun's streams; one thread per stream calls `read`."""

    def __init__(self, log_path: LogPath) -> None:
        self._log_path = log_path
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._files: dict[int | None, IO[bytes]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def tail(self) -> list[str]:
        """The last lines that mpirun and its daemons printed."""
        return list(self._tail)

    def next_event(self, timeout_s: float) -> Event | None:
        """Return the next event, or None at the end of a stream; raises queue.Empty after `timeout_s`."""
        return self._events.get(timeout=timeout_s)

    def read(self, stream: IO[bytes] | None) -> None:
        """Read one stream to its end, even when a log cannot be written: a full pipe would stop the run."""
        assert stream is not None
        # Only this thread closes the stream: close() waits for readers, and an orphan may keep the pipe open.
        try:
            with stream:
                while line := stream.readline(MAX_LINE_BYTES):
                    self._handle_line(line)
        finally:
            self._events.put(None)

    def close(self) -> None:
        """Close the logs; lines that an orphan of mpirun prints later are dropped."""
        with self._lock:
            self._is_closed = True
            for file in self._files.values():
                file.close()

    def _handle_line(self, line: bytes) -> None:
        tagged = _TAGGED.match(line)
        rank = int(tagged[1]) if tagged else None
        text = tagged[3] if tagged else line
        if tagged and tagged[2] == b"stdout" and (event := _parse_event(text)):
            self._events.put(event)
        elif text.strip() and not is_noise(text.decode(errors="replace")):
            with contextlib.suppress(OSError):  # a full disk must not end the run
                self._log(rank, text)

    def _log(self, rank: int | None, text: bytes) -> None:
        text = make_printable(text.replace(b"\0", b"").decode(errors="backslashreplace")).encode()
        with self._lock:
            if self._is_closed:
                return
            if rank is None:
                self._tail.append(text.decode(errors="replace").strip())
            if rank not in self._files:
                self._files[rank] = self._log_path(rank).open("ab")
            self._files[rank].write(text)
            self._files[rank].flush()


def _parse_event(text: bytes) -> Event | None:
    """Return the event on this line; None for an ordinary or damaged line."""
    with contextlib.suppress(ProtocolError):
        return event_from_line(text.decode(errors="replace").rstrip("\r\n"))
    return None
