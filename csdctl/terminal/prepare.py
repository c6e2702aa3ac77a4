"""Work on data while it runs, with a row for each data set or machine, and the results of `prepare`."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.text import Text

from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_bytes, format_count, format_rate, format_seconds, format_share
from csdctl.shipping.deliver import Delivery
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.streams import Streams
from csdctl.terminal.view import DONE, SILENT, STARTING, WIDE, Columns, FleetView, Row, draw_bar, show_elapsed
from csdctl.worker.protocol.datasets import SKIPPED, DatasetInfo, PrepareProgress, list_names
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.workspace.workspace import OnProgress

SILENT_S = 20.0
"""Seconds without a new sample after which the row says so."""
WORKING = "working"


@dataclass
class WorkRow(Row):
    """The samples of one data set, or of one machine."""

    changed_s: float = 0.0
    """When the number of samples last changed."""
    num_done: int = 0
    num_total: int = 0
    """Number of samples; 0: unknown."""
    num_skipped: int = 0
    num_found: int = 0
    """Samples that were done before."""
    began_s: float = 0.0
    """When num_total was known."""
    first: tuple[float, int] | None = None
    """Time and number of samples when the first ones were done: the rate leaves out the start before."""

    @property
    def share(self) -> float:
        """Share of the samples that are done, 0…1."""
        return min(1.0, self.num_done / self.num_total) if self.num_total else float(self.state == DONE)

    @property
    def slowness(self) -> float:
        """Slowness, 0…1: the share that is left, as all began together."""
        return 1.0 - self.share

    @property
    def rate(self) -> float | None:
        """Rate in samples/s up to the latest report; None: unknown."""
        begun = self.began_s, self.num_found
        begun_s, found = self.first if self.first and self.num_done > self.first[1] else begun
        spent_s, computed = self.changed_s - begun_s, self.num_done - found
        return computed / spent_s if spent_s > 0 and computed > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds left, if that is known."""
        if self.num_total and self.num_done >= self.num_total:
            return 0.0
        return (self.num_total - self.num_done) / self.rate if self.rate and self.num_total else None

    def take(self, progress: PrepareProgress, now: float) -> None:
        """Take what the machine reports, each second, whether or not there is more."""
        if self.state == STARTING and (progress.num_total or progress.num_done):
            self.state, self.began_s, self.num_found = WORKING, now, progress.num_done
            self.changed_s = now
        elif progress.num_done != self.num_done:
            self.state, self.changed_s = WORKING, now
            self.first = self.first or (now, progress.num_done)
        self.num_done, self.num_total = progress.num_done, progress.num_total
        self.num_skipped = progress.num_skipped
        if self.num_total and self.num_done >= self.num_total:
            self.state = DONE

    def draw_done(self, width: int) -> Text:
        """Return a bar of the samples that are done; empty as long as their number is unknown."""
        if not self.num_total:
            return Text()
        return draw_bar([self.share], width, f" {format_share(math.floor(self.share * 100) / 100)}")

    def count(self, *, is_whole: bool) -> str:
        """Return the number of samples that are done, and with `is_whole` of how many."""
        done = f"{self.num_done:,}" if self.num_total or self.num_done else ""
        return f"{done} of {self.num_total:,}" if is_whole and self.num_total else done

    def look(self, now: float) -> None:
        """Notice a long silence."""
        silent_s = now - self.changed_s
        if (self.state == WORKING or self.is_sick) and silent_s >= SILENT_S:
            self.state = f"{SILENT} for {show_elapsed(silent_s)}"


class PreparingView(FleetView[WorkRow]):
    """Rows of data sets or machines on a terminal, a line now and then elsewhere; a context manager."""

    is_first_on_top = False

    def __init__(
        self,
        console: PrintableConsole,
        *,
        what: str = "preparing data",
        expected: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expected`: names that have a row before they report."""
        self._rows: dict[str, WorkRow] = {name: WorkRow(name, changed_s=clock()) for name in expected}
        super().__init__(console, what, clock=clock)

    def show(self, data: str, progress: PrepareProgress) -> None:
        """Show the progress of the data set or machine `data`; may be called from any thread."""
        now = self._clock()
        row = self._rows.setdefault(data, WorkRow(data, changed_s=now))
        row.take(progress, now)
        self._print_headline_if_due()

    def _list_rows(self) -> Sequence[WorkRow]:
        rows, now = super()._list_rows(), self._clock()
        for row in rows:
            row.look(now)
        return rows

    def _done(self) -> tuple[float, float | None]:
        rows = self._list_rows()
        is_known = all(row.num_total or row.state == STARTING for row in rows)
        total = sum(row.num_total for row in rows)
        return sum(row.num_done for row in rows), (total if is_known and total else None)

    def _headline(self) -> str:
        rows = self._list_rows()
        elapsed = show_elapsed(self._elapsed_s)
        starting = [row.node for row in rows if row.state == STARTING]
        if len(starting) == len(rows):
            return f"waiting for {format_node_names(starting) or 'the first machine'} to start ({elapsed})"
        done, total = self._done()
        parts = [f"{done:,} of {total:,} samples" if total else f"{done:,} samples"]
        if rate := sum(row.rate or 0.0 for row in rows if row.state != DONE):
            parts.append(f"{format_rate(rate)} samples/s")
        left = [row.left_s for row in rows]
        known = [value for value in left if value is not None]
        if len(known) == len(left):
            parts.append(f"{format_seconds(max(known))} left")
        parts.append(f"{elapsed} so far")
        if starting:
            parts.append(f"waiting for {format_node_names(starting, at_most=2)}")
        return "  ".join(parts)

    def _columns(self, width: int) -> Columns[WorkRow]:
        columns: dict[str, Callable[[WorkRow], str | Text]] = {
            "done": lambda row: row.draw_done(20 if width >= WIDE else 12),
            ">samples": lambda row: row.count(is_whole=width >= WIDE),
            ">samples/s": lambda row: format_rate(row.rate),
            ">left": lambda row: "" if row.left_s == 0 else format_seconds(row.left_s),
        }
        if any(row.num_skipped for row in self._list_rows()):
            columns[""] = lambda row: Text(
                f"{row.num_skipped:,} skipped" if row.num_skipped else "", "yellow"
            )
        return columns


class PreparationScreen:
    """Shows messages, the progress of work on data, and what was sent."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def say(self, line: str) -> None:
        """Show one line."""
        self._streams.say(line)

    def on_delivery(self, node: str, delivery: Delivery) -> None:
        """Show what was sent to a node."""
        if delivery.num_sent:
            sent = format_count(delivery.num_sent, "file")
            self.say(f"{node}: {sent} sent ({format_bytes(delivery.bytes_sent)})")

    @contextmanager
    def preparing(self, what: str = "preparing data", expected: Sequence[str] = ()) -> Iterator[OnProgress]:
        """Open a view of the progress; `expected`: names that will report."""
        with PreparingView(self._streams.views, what=what, expected=expected) as view:
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
        named = f": {', '.join(info.skipped)}; all in {info.path}/{SKIPPED}" if info.skipped else ""
        remarks.append(f"{sum(info.num_skipped.values()):,} skipped ({', '.join(reasons)}){named}")
    if info.unusable_classes:
        remarks.append(f"no usable file in {_list(info.unusable_classes)}")
    empty = [
        name for name, count in info.class_counts.items() if not count and name not in info.unusable_classes
    ]
    if empty:
        remarks.append(f"no samples of {_list(empty)}")
    return remarks


def _list(classes: Sequence[str]) -> str:
    return f"class{'es' if len(classes) > 1 else ''} {list_names(classes)}"


def prepare_document(prepared: Prepared) -> dict[str, object]:
    """Return the `csdctl.prepare/1` document; it has only counts of private data."""
    counts = "num_samples", "num_skipped", "class_counts", "unusable_classes"
    return {
        "schema": "csdctl.prepare/1",
        "public": prepared.public,
        "validation": prepared.validation,
        "private": {
            name: {count: getattr(info, count) for count in counts} for name, info in prepared.private.items()
        },
        "model": prepared.model.info,
    }
