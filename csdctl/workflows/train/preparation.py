"""Preparing a job inside an open workspace, with a view of the progress."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from csdctl.job.model import Job
from csdctl.workflows.data.prepare import OnPrepareProgress, Prepared, prepare_job
from csdctl.workflows.workspace.workspace import Workspace


class PreparationObserver(Protocol):
    """Shows messages and the progress of preparing."""

    def say(self, line: str, /) -> None:
        """Show one line."""

    def preparing(
        self, what: str = ..., expected: Sequence[str] = ..., /
    ) -> AbstractContextManager[OnPrepareProgress]:
        """Open a view of the progress of `what`, of which the names in `expected` report.

        It is closed before anything else is shown but lines of text.
        """


def prepare_in(
    space: Workspace, job: Job, observer: PreparationObserver, *, needs_labels: bool = True
) -> Prepared:
    """Prepare model and data of `job` on the machines of `space`; raises InputError or PartialError."""
    began = time.monotonic()
    with observer.preparing() as on_progress:
        prepared = prepare_job(
            job,
            space.fleet,
            space.sessions,
            space.project,
            observer.say,
            on_progress,
            needs_labels=needs_labels,
        )
    return replace(prepared, elapsed_s=time.monotonic() - began)
