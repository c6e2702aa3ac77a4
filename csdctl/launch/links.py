"""mpirun with the links of a group of ranks, in a thread: it may end at any time, and the ranks stay."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from csdctl.launch.mpi_job import Deadlines, JobOutcome, MpiJob

LINK_DEADLINES = Deadlines(start_s=10**9, silence_s=10**9)
"""Links say nothing: the ranks do."""
GOOD_END_S = 15.0
"""After mpirun has ended well, the ranks have this long to say what became of them."""


class Links:
    """mpirun with a group's links, in a thread."""

    def __init__(
        self,
        command: Sequence[str],
        num_links: int,
        log_path: Callable[[int | None], Path],
        directory: Path,
    ) -> None:
        """Start it; `log_path` and `directory` are those of `MpiJob`."""
        self._job = MpiJob(command, num_links, log_path, directory, os.environ)
        self._outcome: JobOutcome | None = None
        self._ended: float | None = None
        self.started = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        self._outcome = self._job.run(lambda event: None, LINK_DEADLINES)

    @property
    def failed_for_s(self) -> float:
        """For how long mpirun has been gone when it should not be; 0 while it runs.

        When it ends well, the ranks are about to say that they have finished. It also ends well when a node
        is lost, and then they say that.
        """
        if self._thread.is_alive():
            return 0.0
        self._ended = self._ended or time.monotonic()
        ended_s = time.monotonic() - self._ended
        if self._outcome and self._outcome.exit_code == 0:
            ended_s -= GOOD_END_S
        return max(0.0, ended_s)

    def end(self) -> JobOutcome | None:
        """End it if it still runs; returns how it ended."""
        self._job.end()
        self._thread.join(timeout=10)
        return self._outcome
