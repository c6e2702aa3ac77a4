"""The output of one mpirun: events go to a queue, all other lines to the log files."""

import contextlib
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from csdctl.launch.diagnosis import is_noise
from csdctl.runs.capped_log import CappedLog
from csdctl.worker.protocol.events import (
    EVENT_PREFIX,
    FROM_MPI,
    Event,
    Failed,
    Finished,
    Misbehaved,
    Ready,
    Traffic,
    check_event,
    check_sender,
    event_from_line,
)
from csdctl.worker.protocol.json_codec import ProtocolError

LogPath = Callable[[int | None], Path]
"""The log file of a rank; with None, the log file of mpirun itself."""

MAX_LINE_BYTES = 1 << 20
MAX_TAIL_LINES, MAX_TAIL_LINE_BYTES = 60, 1 << 12
MAX_WAITING_EVENTS = 1000
EXPECTED = (*FROM_MPI, Ready, Traffic, Misbehaved, Finished, Failed)
"""The events of an MPI check; a link sends none but `Exited`."""
REMEDY = "check that machine: what runs there is damaged, or is not csdctl's worker"
_TAGGED = re.compile(rb"\[\d+,(\d{1,9})\]<(stdout|stderr)>: ?(.*)", re.DOTALL)
"""A line that mpirun passes on from a rank (--output tag)."""


class MpiOutput:
    """Reads mpirun's streams; one thread per stream calls `read`."""

    def __init__(self, log_path: LogPath, nodes: Sequence[str]) -> None:
        """`nodes` are the machines of mpirun's ranks, in order."""
        self._log_path = log_path
        self._nodes = nodes
        self._events: queue.Queue[Event | None] = queue.Queue(MAX_WAITING_EVENTS)
        self._reported: set[tuple[int, type[Event]]] = set()
        """What each rank has reported: a rank other than 0 reports everything once."""
        self._tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._logs: dict[int | None, CappedLog] = {}
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
                rank, is_whole = None, True
                while line := stream.readline(MAX_LINE_BYTES):
                    if is_whole:
                        rank = self._handle_line(line)
                    else:  # the rest of a long line, which has no tag of its own
                        self._log(rank, line)
                    is_whole = line.endswith(b"\n")
        finally:
            self._put(None)

    def close(self) -> None:
        """Close the logs; lines that an orphan of mpirun prints later are dropped."""
        with self._lock:
            self._is_closed = True
            for log in self._logs.values():
                log.close()

    def _handle_line(self, line: bytes) -> int | None:
        """Handle the beginning of a line; return the rank that it came from, None for mpirun itself."""
        tagged = _TAGGED.match(line)
        if not tagged or int(tagged[1]) >= len(self._nodes):
            self._log(None, line)
            return None
        rank, text = int(tagged[1]), tagged[3]
        if tagged[2] == b"stdout" and text.startswith(EVENT_PREFIX.encode()):
            self._handle_event(rank, text.decode(errors="replace").rstrip("\r\n"))
        else:
            self._log(rank, text)
        return rank

    def _handle_event(self, rank: int, line: str) -> None:
        """Pass on the event in `line`; an invalid one means that the rank has failed."""
        try:
            event = event_from_line(line)
            if not isinstance(event, EXPECTED):
                raise ProtocolError(f"expected an event of an MPI check, received {type(event).__name__}")
            check_sender(event, rank, self._nodes)
            check_event(event, self._nodes)
        except ProtocolError as error:
            self._log(rank, line.encode(errors="replace"))
            event = Failed(rank, self._nodes[rank], f"sent an invalid event: {error}", REMEDY)
        if rank == 0 or (rank, type(event)) not in self._reported:
            self._reported.add((rank, type(event)))
            self._put(event)

    def _put(self, event: Event | None) -> None:
        """Queue an event; mpirun waits while too many are queued."""
        while not self._is_closed:
            with contextlib.suppress(queue.Full):
                return self._events.put(event, timeout=0.2)

    def _log(self, rank: int | None, text: bytes) -> None:
        if not text.strip() or is_noise(text.decode(errors="replace")):
            return
        with self._lock:
            if self._is_closed:
                return
            if rank is None:
                self._tail.append(text[:MAX_TAIL_LINE_BYTES].decode(errors="replace").strip())
            if rank not in self._logs:
                name = "mpirun" if rank is None else self._nodes[rank]
                self._logs[rank] = CappedLog(self._log_path(rank), name)
            self._logs[rank].write(text)
