"""mpirun with the links of one group, in a thread: mpirun may exit at any time, the ranks keep running."""

import threading
import time

from csdctl.launch.mpi_job import Deadlines, JobOutcome, MpiJob

NO_DEADLINES = Deadlines(start_s=10**9, silence_s=10**9)
"""Links print no events: the ranks report over SSH."""


class Links:
    """One mpirun, from its start to its end."""

    def __init__(self, job: MpiJob) -> None:
        """Start `job`."""
        self._job = job
        self._outcome: JobOutcome | None = None
        self._exited: float | None = None
        self.started = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        self._outcome = self._job.run(lambda event: None, NO_DEADLINES)

    def has_failed(self, grace_s: float) -> bool:
        """Return whether mpirun has exited although the ranks still need it.

        mpirun exits with 0 when the ranks have finished, and also when a node is lost. The ranks report
        which of the two: for `grace_s` after an exit with 0, this returns False.
        """
        if self._thread.is_alive():
            return False
        self._exited = self._exited or time.monotonic()
        is_clean = self._outcome is not None and self._outcome.exit_code == 0
        return time.monotonic() - self._exited > (grace_s if is_clean else 0.0)

    def end(self) -> JobOutcome | None:
        """End mpirun if it still runs, and return how it ended."""
        self._job.end()
        self._thread.join(timeout=10)
        return self._outcome
