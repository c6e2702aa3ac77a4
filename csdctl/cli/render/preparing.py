"""`prepare` while it goes on, and what it left out."""

import time
from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from csdctl.cli.render.view import View
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.workflows.data.prepare import Prepared

LINE_INTERVAL_S = 10.0
"""Between two lines of one data set where there is no terminal."""

_SHOWN_CLASSES = 5


class PreparingView(View):
    """A bar for each data set on a terminal, a line now and then elsewhere; a context manager."""

    def __init__(self, console: Console, *, line_interval_s: float = LINE_INTERVAL_S) -> None:
        self._console = console
        self._line_interval_s = line_interval_s
        self._bars: dict[str, TaskID] = {}
        self._said_at: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[skipped]}", style="yellow"),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        super().__init__(self._progress)

    def show(self, data: str, progress: PrepareProgress) -> None:
        """Take in how far the data set `data` is; from any thread."""
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
            self._console.print(line, markup=False, soft_wrap=True)

    def _is_due(self, data: str) -> bool:
        now = time.monotonic()
        if now - self._said_at.setdefault(data, now) < self._line_interval_s:
            return False
        self._said_at[data] = now
        return True


def render_prepared(console: Console, prepared: Prepared) -> None:
    """A line for each data set of which something was left out, or in which a class has nothing."""
    named = {"public": prepared.public, "validation": prepared.validation, **prepared.private}
    for name, info in named.items():
        for line in _remarks(info) if info else ():
            console.print(f"{name}: {line}", markup=False, soft_wrap=True)


def _remarks(info: DatasetInfo) -> list[str]:
    remarks = []
    if info.num_skipped:
        kinds = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in info.num_skipped.items()]
        remarks.append(f"{sum(info.num_skipped.values()):,} left out ({', '.join(kinds)})")
    if info.unusable_classes:
        remarks.append(f"no file can be used of {_list(info.unusable_classes)}")
    absent = [
        name for name, count in info.class_counts.items() if not count and name not in info.unusable_classes
    ]
    if absent:
        remarks.append(f"no samples of {_list(absent)}")
    return remarks


def _list(classes: "list[str] | tuple[str, ...]") -> str:
    more = f" and {len(classes) - _SHOWN_CLASSES} more" if len(classes) > _SHOWN_CLASSES else ""
    return f"class{'es' if len(classes) > 1 else ''} " + ", ".join(classes[:_SHOWN_CLASSES]) + more


def prepare_document(prepared: Prepared) -> dict[str, object]:
    """The `csdctl.prepare/1` document; of private data it has counts alone."""
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
