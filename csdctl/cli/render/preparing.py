"""`prepare` while it runs, and its result."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TimeRemainingColumn

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.view import View, new_progress, text_column
from csdctl.cli.streams import Streams
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.workflows.data.prepare import OnPrepareProgress, Prepared

LINE_INTERVAL_S = 10.0
"""Between two lines about one data set, without a terminal."""

_SHOWN_CLASSES = 5


class PreparingView(View):
    """A bar for each data set on a terminal, a line every few seconds elsewhere; a context manager."""

    def __init__(self, console: PrintableConsole, *, line_interval_s: float = LINE_INTERVAL_S) -> None:
        self._console = console
        self._line_interval_s = line_interval_s
        self._bars: dict[str, TaskID] = {}
        self._printed_at: dict[str, float] = {}
        problems = text_column("{task.fields[skipped]}", style="yellow")
        bar = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = new_progress(console, *bar, problems)
        super().__init__(self._progress)

    def show(self, data: str, progress: PrepareProgress) -> None:
        """Show the progress of the data set `data`; may be called from any thread."""
        skipped = f"{progress.num_skipped:,} left out" if progress.num_skipped else ""
        if self._console.is_terminal:
            if data not in self._bars:
                self._bars[data] = self._progress.add_task(data, total=None, skipped="")
            self._progress.update(
                self._bars[data],
                completed=progress.num_done,
                total=progress.num_total or None,
                skipped=skipped,
            )
        elif progress.num_done and self._is_due(data):
            total = f" of {progress.num_total:,}" if progress.num_total else ""
            line = ", ".join(filter(None, [f"{data}: {progress.num_done:,}{total} samples", skipped]))
            self._console.print(line, soft_wrap=True)

    def _is_due(self, data: str) -> bool:
        now = time.monotonic()
        if now - self._printed_at.setdefault(data, now) < self._line_interval_s:
            return False
        self._printed_at[data] = now
        return True


class PreparationScreen:
    """Shows messages and the progress of preparing a job."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def say(self, line: str) -> None:
        """Show one line."""
        self._streams.say(line)

    def preparing(self) -> AbstractContextManager[OnPrepareProgress]:
        """Open a view of the progress."""
        return _show_progress(self._streams)


@contextmanager
def _show_progress(streams: Streams) -> Iterator[OnPrepareProgress]:
    with PreparingView(streams.console) as view:
        yield view.show


def render_prepared(console: PrintableConsole, prepared: Prepared) -> None:
    """Print what was left out of each data set, which classes are empty, and the totals."""
    named = {"public": prepared.public, "validation": prepared.validation, **prepared.private}
    for name, info in named.items():
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
        remarks.append(f"{sum(info.num_skipped.values()):,} left out ({', '.join(reasons)})")
    if info.unusable_classes:
        remarks.append(f"no usable file in {_list(info.unusable_classes)}")
    empty = [
        name for name, count in info.class_counts.items() if not count and name not in info.unusable_classes
    ]
    if empty:
        remarks.append(f"no samples of {_list(empty)}")
    return remarks


def _list(classes: "list[str] | tuple[str, ...]") -> str:
    more = f" and {len(classes) - _SHOWN_CLASSES} more" if len(classes) > _SHOWN_CLASSES else ""
    return f"class{'es' if len(classes) > 1 else ''} " + ", ".join(classes[:_SHOWN_CLASSES]) + more


def prepare_document(prepared: Prepared) -> dict[str, object]:
    """Return the `csdctl.prepare/1` document; it has only counts of private data."""
    return {
        "schema": "csdctl.prepare/1",
        "public": asdict(prepared.public),
        "validation": asdict(prepared.validation) if prepared.validation else None,
        "private": {name: _counts(info) for name, info in prepared.private.items()},
        "model": asdict(prepared.model.info),
    }


def _counts(info: DatasetInfo) -> Mapping[str, object]:
    return {
        "num_samples": info.num_samples,
        "num_skipped": info.num_skipped,
        "class_counts": info.class_counts,
        "unusable_classes": info.unusable_classes,
    }
