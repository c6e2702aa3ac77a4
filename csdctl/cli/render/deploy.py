"""A deploy while it goes on, and what came of it."""

from collections.abc import Mapping
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from csdctl.cli.render.numbers import format_bytes
from csdctl.cli.render.view import View
from csdctl.errors import CsdctlError
from csdctl.shipping.deliver import Delivery, DeliveryProgress
from csdctl.transport.many import Outcome
from csdctl.workflows.workspace.partial_failure import failed_document

SCHEMA = "csdctl.deploy/1"
MAX_BARS = 10
"""Bars of nodes at once, below the one of the whole fleet."""


class DeployView(View):
    """A bar for the fleet and one for each node at work on a terminal, a line for each node elsewhere."""

    def __init__(self, console: Console, *, num_nodes: int, dry_run: bool = False) -> None:
        self._console = console
        self._num_nodes = num_nodes
        self._num_done = 0
        self._dry_run = dry_run
        self._bars: dict[str, TaskID] = {}
        self._bytes: dict[str, DeliveryProgress] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        super().__init__(self._progress)
        self._fleet = self._progress.add_task(self._title(), total=None)

    def advance(self, news: DeliveryProgress) -> None:
        """Take in how far a node is; from any thread."""
        if not self._console.is_terminal:
            return
        self._bytes[news.node] = news
        if news.node not in self._bars and len(self._bars) < MAX_BARS:
            self._bars[news.node] = self._progress.add_task(news.node, total=news.bytes_total)
        if news.node in self._bars:
            self._progress.update(
                self._bars[news.node],
                completed=news.bytes_sent,
                total=news.bytes_total,
            )
        self._show_fleet()

    def finish(self, outcome: Outcome[Delivery]) -> None:
        """Take in what became of a node."""
        self._num_done += 1
        if outcome.name in self._bars:
            self._progress.remove_task(self._bars.pop(outcome.name))
        self._show_fleet()
        if not self._console.is_terminal:
            self._console.print(self._line(outcome), markup=False, soft_wrap=True)

    def _show_fleet(self) -> None:
        known = list(self._bytes.values())
        self._progress.update(
            self._fleet,
            description=self._title(),
            completed=sum(news.bytes_sent for news in known),
            total=sum(news.bytes_total for news in known) or None,
        )

    def _title(self) -> str:
        return f"{self._num_done} of {self._num_nodes} nodes"

    def _line(self, outcome: Outcome[Delivery]) -> str:
        if outcome.value is None:
            return f"{outcome.name}: failed"
        sent = "would be sent" if self._dry_run else "sent"
        return (
            f"{outcome.name}: {outcome.value.num_sent:,} files {sent} "
            f"({format_bytes(outcome.value.bytes_sent)}), {outcome.value.num_present:,} there already"
        )


def render_deliveries(console: Console, outcomes: Mapping[str, Outcome[Delivery]], *, dry_run: bool) -> None:
    """One row a node: what was sent to it, or would be."""
    table = Table(box=box.SIMPLE)
    table.add_column("node", no_wrap=True)
    for column in ("would be sent" if dry_run else "sent", "bytes", "there already"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, outcome in outcomes.items():
        if outcome.value is None:
            table.add_row(name, "[red]failed[/red]", "", "")
            continue
        table.add_row(
            name,
            f"{outcome.value.num_sent:,}",
            format_bytes(outcome.value.bytes_sent),
            f"{outcome.value.num_present:,}",
        )
    console.print(table)


def deploy_document(
    outcomes: Mapping[str, Outcome[Delivery]], failed: Mapping[str, CsdctlError], *, dry_run: bool
) -> dict[str, object]:
    """The `csdctl.deploy/1` document."""
    return {
        "schema": SCHEMA,
        "is_dry_run": dry_run,
        "nodes": {name: asdict(outcome.value) for name, outcome in outcomes.items() if outcome.value},
        "failed": failed_document(failed),
    }
