"""Work on data while it runs, with a row for each data set or machine, and the results of `prepare`."""

import time
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from csdctl.reporting.numbers import format_bytes, format_count
from csdctl.terminal.console import PrintableConsole, View
from csdctl.terminal.streams import Streams, document
from csdctl.worker.protocol.datasets import SKIPPED, DatasetInfo, PrepareProgress, list_names
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.workspace.event_stream import (
    EventStream,
    FilesSent,
    Message,
    WorkEnded,
    WorkProgressed,
    WorkStarted,
)

INTERVAL_S = 5.0
"""Seconds between two lines where there is no terminal."""
MAX_NAMED = 8
"""The most data sets or machines in such a line."""


class PreparingView(View):
    """A bar for each data set or machine on a terminal, a line now and then elsewhere. A context manager."""

    def __init__(
        self,
        console: PrintableConsole,
        *,
        what: str = "preparing data",
        expected: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expected`: names that have a bar before they report."""
        self._what, self._clock, self._printed_at = what, clock, clock()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[samples]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("{task.fields[skipped]}", style="yellow", markup=False),
            get_time=clock,
        )
        super().__init__(console, lambda: Group(Text(what, style="bold"), self._progress))
        self._tasks = {name: self._add(name) for name in expected}

    def _add(self, name: str) -> TaskID:
        return self._progress.add_task(name, total=None, samples="starting", skipped="")

    def show(self, data: str, progress: PrepareProgress) -> None:
        """Show the progress of the data set or machine `data`. May be called from any thread."""
        if data not in self._tasks:
            self._tasks[data] = self._add(data)
        done, total = progress.num_done, progress.num_total
        self._progress.update(
            self._tasks[data],
            completed=done,
            total=total or None,
            samples=f"{done:,} of {total:,} samples" if total else f"{done:,} samples",
            skipped=f"{progress.num_skipped:,} skipped" if progress.num_skipped else "",
        )
        if self._live is None and self._clock() - self._printed_at >= INTERVAL_S:
            self._printed_at = self._clock()
            tasks = [
                f"{task.description} {task.fields['samples']}" for task in self._progress.tasks[:MAX_NAMED]
            ]
            more = len(self._progress.tasks) - len(tasks)
            self._print(f"{self._what}: {', '.join(tasks)}" + (f" and {more} more" if more else ""))


class PreparationScreen:
    """Shows the events of a workflow: messages, the progress of work on data, and what was sent."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._work: PreparingView | None = None
        self.events = EventStream((self.show,))

    def say(self, line: str) -> None:
        """Show one line."""
        self._streams.say(line)

    def show(self, event: object) -> None:
        """Show one event. Ignores events of other types."""
        if isinstance(event, Message):
            self.say(event.text)
        elif isinstance(event, WorkStarted):
            self._work = PreparingView(self._streams.views, what=event.what, expected=event.names)
            self._work.__enter__()
        elif isinstance(event, WorkProgressed) and self._work:
            self._work.show(event.name, event.progress)
        elif isinstance(event, WorkEnded) and self._work:
            self._work.__exit__(None, None, None)
            self._work = None
        elif isinstance(event, FilesSent) and event.delivery.num_sent:
            sent = format_count(event.delivery.num_sent, "file")
            self.say(f"{event.node}: {sent} sent ({format_bytes(event.delivery.bytes_sent)})")


def render_prepared(console: PrintableConsole, prepared: Prepared) -> None:
    """Print what was left out of each data set, which classes are empty, and the totals."""
    data_sets = {"public": prepared.public, "validation": prepared.validation, **prepared.private}
    for name, info in data_sets.items():
        for line in _remarks(info) if info else ():
            console.print(f"{name}: {line}", soft_wrap=True)
    private = sum(info.num_samples for info in prepared.private.values())
    console.print(
        f"ready: {prepared.public.num_samples:,} public samples on the host, "
        f"{private:,} private samples on {len(prepared.private)} nodes, "
        f"model with {prepared.model.info.num_parameters:,} parameters",
        soft_wrap=True,
    )


def _remarks(info: DatasetInfo) -> list[str]:
    remarks = []
    if info.num_skipped:
        reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in info.num_skipped.items()]
        named = f": {', '.join(info.skipped)}; all in {info.path}/{SKIPPED}" if info.skipped else ""
        remarks.append(f"{sum(info.num_skipped.values()):,} skipped ({', '.join(reasons)}){named}")
    if info.unusable_classes:
        remarks.append(f"no usable file in {_list_classes(info.unusable_classes)}")
    empty = [
        name for name, count in info.class_counts.items() if not count and name not in info.unusable_classes
    ]
    if empty:
        remarks.append(f"no samples of {_list_classes(empty)}")
    return remarks


def _list_classes(classes: Sequence[str]) -> str:
    return f"class{'es' if len(classes) > 1 else ''} {list_names(classes)}"


def prepare_document(prepared: Prepared) -> dict[str, object]:
    """Return the `csdctl.prepare/1` document. It has only counts of private data."""
    counts = "num_samples", "num_skipped", "class_counts", "unusable_classes"
    return document(
        "csdctl.prepare/1",
        public=prepared.public,
        validation=prepared.validation,
        private={
            name: {count: getattr(info, count) for count in counts} for name, info in prepared.private.items()
        },
        model=prepared.model.info,
    )
