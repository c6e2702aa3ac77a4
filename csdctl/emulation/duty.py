"""A CPU limit without privileges: a token bucket that stops processes when their share is used up.

Every period adds the node's share of CPU seconds to a bucket; the CPU time of the node's processes drains it.
Processes are stopped (SIGSTOP) only while the bucket is empty, and continued (SIGCONT) when a period has
refilled it, so that an idle node is never stopped.

A process that another process has stopped stays stopped, unless that happens while it is stopped here: then
it is continued with the node.
"""

import contextlib
import logging
import os
import resource
import signal
import threading
import time

from csdctl.emulation.processes import cpu_time_s, list_descendants, load_stat, send_signal

PERIOD_S = 0.020
MIN_CHECK_S = 0.002
IDLE_CHECK_S = 0.100
"""Between checks of a node without processes; CPU time used meanwhile is charged later."""
MAX_STOP_S = 0.5
"""Limits the debt, for instance after a late check: a node that stops for seconds is considered dead."""

log = logging.getLogger(__name__)


class DutyCycle:
    """Limit the descendants of process `root_pid` (this process) to `cpu` cores, in a thread."""

    mechanism = "duty"

    def __init__(self, root_pid: int, cpu: float) -> None:
        self._root_pid = root_pid
        self._cpu = cpu
        self._num_cores = os.cpu_count() or 1
        self._tokens_s = 0.0
        self._used_s = self._measure_used_s([])
        self._period = 0
        self._stopped: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duty cycle", daemon=True)
        self._thread.start()

    def build_command(self, command: list[str]) -> list[str]:
        """Return `command` unchanged: descendants are found automatically."""
        return command

    def close(self) -> None:
        """End the thread and continue all stopped processes."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while not self._ended.wait(pause_s):
                try:
                    pause_s = self._step(time.monotonic())
                except Exception:  # a single failed read of /proc must not lift the limit
                    log.exception("duty cycle")
                    pause_s = PERIOD_S
        finally:
            self._resume()

    def _step(self, now: float) -> float:
        """Check the node once; return the seconds until the next check."""
        pids = list_descendants(self._root_pid)
        spent_s = self._spend(pids)
        self._refill(int(now / PERIOD_S))
        to_next_period_s = (self._period + 1) * PERIOD_S - now
        if self._tokens_s <= 0:
            self._stop(pids)
            return to_next_period_s
        self._resume()
        if not pids:
            return IDLE_CHECK_S
        if not spent_s:
            return to_next_period_s
        # All cores may work for this node: check again when they could have used up the bucket.
        return min(to_next_period_s, max(MIN_CHECK_S, self._tokens_s / self._num_cores))

    def _refill(self, period: int) -> None:
        """Add the share of the elapsed periods; the bucket holds at most one and a half."""
        share_s = self._cpu * PERIOD_S
        self._tokens_s = min(1.5 * share_s, self._tokens_s + (period - self._period) * share_s)
        self._tokens_s = max(-MAX_STOP_S * self._cpu, self._tokens_s)
        self._period = period

    def _spend(self, pids: list[int]) -> float:
        """Subtract the CPU seconds used since the last check from the bucket, and return them."""
        used_s = self._measure_used_s(pids)
        # A process that is being reaped is missing for a moment: the sum never really decreases.
        spent_s = max(0.0, used_s - self._used_s)
        self._used_s = max(used_s, self._used_s)
        self._tokens_s -= spent_s
        return spent_s

    def _measure_used_s(self, pids: list[int]) -> float:
        """Return the CPU seconds of the node so far, of running and ended processes."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = ended.ru_utime + ended.ru_stime
        for pid in pids:
            stat = load_stat(pid)
            used_s += cpu_time_s(pid) + (stat.children_cpu_s if stat else 0.0)
        return used_s

    def _stop(self, pids: list[int]) -> None:
        running = self._stoppable(pids)
        while running:  # includes processes forked before their parent was stopped
            send_signal(running, signal.SIGSTOP)
            self._stopped |= running
            running = self._stoppable(list_descendants(self._root_pid))

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
