"""A share of the CPU without privileges: what has used up its share is stopped until it is due again.

On every beat of the clock a bucket of CPU seconds is given the node's share; what the node's
processes really used drains it. Only when it is empty are they stopped (SIGSTOP), until a beat has
filled it again (SIGCONT), so a node that waits or sleeps is never touched.

A process that somebody else stopped is left stopped; only, to stop one that is stopped here already
makes no difference: it is continued when the node is.
"""

import contextlib
import logging
import os
import resource
import signal
import threading
import time

from csdctl.emulation.processes import cpu_time_s, list_descendants, load_stat, send_signal

BEAT_S = 0.020
SHORTEST_LOOK_S = 0.002
EMPTY_LOOK_S = 0.100
"""Between looks at a node where nothing runs: what a new process used meanwhile is made up for."""
LONGEST_STOP_S = 0.5
"""However much was used beyond the share, as by a thread that was looked at late: a node that stands
still for seconds is taken for dead."""

log = logging.getLogger(__name__)


class DutyCycle:
    """Holds the descendants of the process `root_pid` (this process) to `cpu` cores, in a thread."""

    mechanism = "duty"

    def __init__(self, root_pid: int, cpu: float) -> None:
        self._root_pid = root_pid
        self._cpu = cpu
        self._num_cores = os.cpu_count() or 1
        self._tokens_s = 0.0
        self._used_s = self._measure_used_s([])
        self._beat = 0
        self._stopped: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duty cycle", daemon=True)
        self._thread.start()

    def build_command(self, command: list[str]) -> list[str]:
        """`command` as it is: descendants are found by themselves."""
        return command

    def close(self) -> None:
        """End the thread; nothing stays stopped."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while not self._ended.wait(pause_s):
                try:
                    pause_s = self._step(time.monotonic())
                except Exception:  # one bad look at /proc must not free the node for good
                    log.exception("duty cycle")
                    pause_s = BEAT_S
        finally:
            self._resume()

    def _step(self, now: float) -> float:
        """Look at the node once; returns the seconds until the next look."""
        pids = list_descendants(self._root_pid)
        spent_s = self._spend(pids)
        self._refill(int(now / BEAT_S))
        to_next_beat_s = (self._beat + 1) * BEAT_S - now
        if self._tokens_s <= 0:
            self._stop(pids)
            return to_next_beat_s
        self._resume()
        if not pids:
            return EMPTY_LOOK_S
        if not spent_s:
            return to_next_beat_s
        # All cores may be busy for this node: look again when that would have used it up.
        return min(to_next_beat_s, max(SHORTEST_LOOK_S, self._tokens_s / self._num_cores))

    def _refill(self, beat: int) -> None:
        """Give the share of the beats that passed; a rested node has no more than one and a half."""
        share_s = self._cpu * BEAT_S
        self._tokens_s = min(1.5 * share_s, self._tokens_s + (beat - self._beat) * share_s)
        self._tokens_s = max(-LONGEST_STOP_S * self._cpu, self._tokens_s)
        self._beat = beat

    def _spend(self, pids: list[int]) -> float:
        """Take from the bucket the CPU seconds used since the last look, and return them."""
        used_s = self._measure_used_s(pids)
        # A process that is just being reaped is missing for a moment: the sum never really falls.
        spent_s = max(0.0, used_s - self._used_s)
        self._used_s = max(used_s, self._used_s)
        self._tokens_s -= spent_s
        return spent_s

    def _measure_used_s(self, pids: list[int]) -> float:
        """CPU seconds of the node so far: what runs, and what has ended."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = ended.ru_utime + ended.ru_stime
        for pid in pids:
            stat = load_stat(pid)
            used_s += cpu_time_s(pid) + (stat.children_cpu_s if stat else 0.0)
        return used_s

    def _stop(self, pids: list[int]) -> None:
        newcomers = self._stoppable(pids)
        while newcomers:  # what was forked before its parent was stopped
            send_signal(newcomers, signal.SIGSTOP)
            self._stopped |= newcomers
            newcomers = self._stoppable(list_descendants(self._root_pid))

    def _stoppable(self, pids: list[int]) -> set[int]:
        found = set()
        for pid in set(pids) - self._stopped:
            stat = load_stat(pid)
            if stat and not stat.has_ended and stat.state not in "Tt":
                found.add(pid)
        return found

    def _resume(self) -> None:
        stopped, self._stopped = self._stopped, set()
        with contextlib.suppress(OSError):
            send_signal(stopped, signal.SIGCONT)
