"""The processes of a run's ranks, at most one for each rank: start, receive, drop, restart, close.

One thread calls all methods. Restarts run in separate threads, since a lost machine may respond slowly; a
restarted process arrives as a message, before anything it sends. `Inbox` makes one sequence of all messages,
in which one whose handling is interrupted is not lost.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from csdctl.supervision.rank_process import OnMessage, ProcessEnded, RankMessage, RankProcess
from csdctl.worker.protocol.events import Event
from csdctl.worker.protocol.orders import Order

StartRank = Callable[[int, OnMessage], RankProcess]
"""Start a rank, and pass all its messages to the callable. May raise CsdctlError."""


@dataclass(frozen=True)
class Restarted:
    """A rank that was dropped has a process again, which is not ready yet."""

    rank: int


MAX_WAITING = 256
"""Messages of one process that may wait to be handled; before more are read, its reader waits."""


class _MessageBuffer:
    """The messages of one process, held back until `release`: its owner must know the process first."""

    def __init__(self, deliver: "Callable[[_MessageBuffer, RankMessage], None]") -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._held: list[RankMessage] | None = []
        self._room = threading.Semaphore(MAX_WAITING)
        self._is_dropped = False

    def put(self, message: RankMessage) -> None:
        self._room.acquire()
        if self._is_dropped:
            self._room.release()  # for the next message, which is dropped too
            return
        with self._lock:
            if self._held is None:
                self._deliver(self, message)
            else:
                self._held.append(message)

    def release(self) -> None:
        with self._lock:
            for message in self._held or ():
                self._deliver(self, message)
            self._held = None

    def take(self) -> None:
        """Make room for another message: one was taken out."""
        self._room.release()

    def drop(self) -> None:
        """Ignore all further messages; `put` waits no longer."""
        self._is_dropped = True
        self._room.release()


class RankProcesses:
    """The processes of all ranks of one run; `close` ends them, whatever happened."""

    def __init__(self, start: StartRank, restart: StartRank, restart_interval_s: float) -> None:
        self._start = start
        self._restart = restart
        self._restart_interval_s = restart_interval_s
        self._messages: queue.Queue[tuple[_MessageBuffer, RankMessage | RankProcess]] = queue.Queue()
        self._processes: dict[int, RankProcess] = {}
        self._buffers: dict[int, _MessageBuffer] = {}
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @property
    def ranks(self) -> set[int]:
        """The ranks that have a process."""
        return set(self._processes)

    def start(self, rank: int) -> None:
        """Start a rank; raise CsdctlError if that fails."""
        buffer = _MessageBuffer(self._deliver)
        self._processes[rank] = self._start(rank, buffer.put)
        self._buffers[rank] = buffer
        buffer.release()

    def _deliver(self, buffer: _MessageBuffer, message: RankMessage | RankProcess) -> None:
        self._messages.put((buffer, message))

    def next(self, timeout_s: float) -> Event | ProcessEnded | Restarted | None:
        """Return the next message; None if none arrives in time, or if its process was dropped."""
        try:
            buffer, message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if not isinstance(message, Event | ProcessEnded):
            self._processes[message.rank] = message
            self._buffers[message.rank] = buffer
            return Restarted(message.rank)
        buffer.take()
        return message if self._buffers.get(message.rank) is buffer else None

    def send(self, rank: int, order: Order) -> None:
        """Send an order to a rank; do nothing if the rank has no process."""
        if process := self._processes.get(rank):
            process.send(order)

    def drop(self, rank: int) -> None:
        """Close the rank's process and ignore all its messages from now on."""
        if buffer := self._buffers.pop(rank, None):
            buffer.drop()
        if process := self._processes.pop(rank, None):
            process.close()

    def restart(self, rank: int) -> None:
        """Try to restart a dropped rank until it succeeds or the run is over; return at once."""
        name = f"restart rank {rank}"
        threading.Thread(target=self._keep_restarting, args=(rank,), name=name, daemon=True).start()

    def _keep_restarting(self, rank: int) -> None:
        while not self._is_over.is_set():
            buffer = _MessageBuffer(self._deliver)
            try:
                process = self._restart(rank, buffer.put)
            except Exception:  # whatever the cause, the next attempt may succeed
                self._is_over.wait(self._restart_interval_s)
                continue
            with self._lock:
                if not self._is_over.is_set():
                    self._messages.put((buffer, process))
                    buffer.release()
                    return
            buffer.drop()
            process.close()
            return

    def close(self) -> None:
        """End all processes, including restarted ones that `next` has not returned yet."""
        with self._lock:
            self._is_over.set()
        while not self._messages.empty():
            self.next(0.0)
        for buffer in self._buffers.values():
            buffer.drop()
        for process in self._processes.values():
            process.close()


class Inbox:
    """Messages to handle: postponed messages first, then new ones as they arrive."""

    def __init__(
        self,
        receive: Callable[[float], RankMessage | Restarted | None],
        on_arrival: Callable[[RankMessage | Restarted], None],
    ) -> None:
        """`receive` waits up to the given seconds; `on_arrival` is called once with every new message."""
        self._receive = receive
        self._on_arrival = on_arrival
        self._postponed: deque[RankMessage] = deque()
        self._unhandled: RankMessage | None = None

    def next(self, timeout_s: float) -> RankMessage | None:
        """Return the next message to handle, None when none is available in time."""
        if not self._postponed:
            return self.next_new(timeout_s)
        self._unhandled = self._postponed.popleft()
        return self._unhandled

    def next_new(self, timeout_s: float) -> RankMessage | None:
        """Return the next message that arrives, None when none arrives in time."""
        message = self._receive(timeout_s)
        if isinstance(message, Restarted):
            self._on_arrival(message)
            return None
        self._unhandled = message
        if message is not None:
            self._on_arrival(message)
        return message

    def postpone(self, message: RankMessage) -> None:
        """Return `message` from `next` again, after the messages postponed before it."""
        self._postponed.append(message)

    def mark_handled(self) -> None:
        """Record that the latest message from `next` needs no more handling."""
        self._unhandled = None

    def requeue_unhandled(self) -> None:
        """Return the latest message from `next` once more, before all others, unless it was handled.

        An interrupt may come at any point, even before the message was handled.
        """
        if self._unhandled:
            self._postponed.appendleft(self._unhandled)

    def discard(self, rank: int) -> None:
        """Forget the postponed messages of `rank`."""
        self._postponed = deque(message for message in self._postponed if message.rank != rank)
