"""The processes of a run's ranks, one each at a time: started, heard, given up, started again, closed.

All methods are for one thread. What is started again is started in threads of its own, since a machine that
was lost may take its time; it arrives here as a notice, before anything it says.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from csdctl.launch.rank_process import ProcessEnded, RankMessage, RankProcess
from csdctl.worker.protocol.events import Event
from csdctl.worker.protocol.orders import Order

RETURN_INTERVAL_S = 10.0
StartRank = Callable[[int, Callable[[RankMessage], None]], RankProcess]
"""Starts a rank; everything it says goes to the callable. May raise CsdctlError."""


@dataclass(frozen=True)
class Restarted:
    """A rank that was given up has a process again, which is not ready yet."""

    rank: int


class _Voice:
    """What one process says: held back until `release`, so that nobody hears a process he does not know."""

    def __init__(self, hear: "Callable[[_Voice, RankMessage], None]") -> None:
        self._hear = hear
        self._lock = threading.Lock()
        self._held: list[RankMessage] | None = []

    def say(self, notice: RankMessage) -> None:
        with self._lock:
            if self._held is None:
                self._hear(self, notice)
            else:
                self._held.append(notice)

    def release(self) -> None:
        with self._lock:
            for notice in self._held or ():
                self._hear(self, notice)
            self._held = None


class RankProcesses:
    """The processes of all ranks of one run; `close` ends them, whatever happened."""

    def __init__(self, start: StartRank, restart: StartRank) -> None:
        self._start = start
        self._restart = restart
        self._heard: queue.Queue[tuple[_Voice, RankMessage | RankProcess]] = queue.Queue()
        self._processes: dict[int, RankProcess] = {}
        self._voices: dict[int, _Voice] = {}
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @property
    def ranks(self) -> set[int]:
        """Those that have a process."""
        return set(self._processes)

    def start(self, rank: int) -> None:
        """Start a rank; raises CsdctlError."""
        voice = _Voice(self._hear)
        self._processes[rank] = self._start(rank, voice.say)
        self._voices[rank] = voice
        voice.release()

    def _hear(self, voice: _Voice, notice: RankMessage | RankProcess) -> None:
        self._heard.put((voice, notice))

    def next(self, timeout_s: float) -> Event | ProcessEnded | Restarted | None:
        """What was said next; None when nothing was in time, or by a process that has been given up."""
        try:
            voice, notice = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if not isinstance(notice, Event | ProcessEnded):
            self._processes[notice.rank] = notice
            self._voices[notice.rank] = voice
            return Restarted(notice.rank)
        return notice if self._voices.get(notice.rank) is voice else None

    def order(self, rank: int, order: Order) -> None:
        """Tell a rank something; one that has no process does not hear it."""
        if process := self._processes.get(rank):
            process.order(order)

    def give_up(self, rank: int) -> None:
        """Close the rank's process; nothing it has said is heard any more."""
        self._voices.pop(rank, None)
        if process := self._processes.pop(rank, None):
            process.close()

    def bring_back(self, rank: int) -> None:
        """Try to start a rank that was given up again until that works or all is over; returns at once."""
        name = f"bring back rank {rank}"
        threading.Thread(target=self._bring_back, args=(rank,), name=name, daemon=True).start()

    def _bring_back(self, rank: int) -> None:
        while not self._is_over.is_set():
            voice = _Voice(self._hear)
            try:
                process = self._restart(rank, voice.say)
            except Exception:  # whatever it was, the machine may be well the next time
                self._is_over.wait(RETURN_INTERVAL_S)
                continue
            with self._lock:
                if not self._is_over.is_set():
                    self._heard.put((voice, process))
                    voice.release()
                    return
            process.close()
            return

    def close(self) -> None:
        """End all processes, also those that nobody has taken in yet."""
        with self._lock:
            self._is_over.set()
        while not self._heard.empty():
            self.next(0.0)
        for process in self._processes.values():
            process.close()
