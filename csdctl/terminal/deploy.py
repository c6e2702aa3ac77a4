"""`deploy` while it runs, and its result."""

from collections.abc import Mapping

from rich import box
from rich.progress import BarColumn, DownloadColumn, TaskID, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from csdctl.reporting.numbers import format_bytes
from csdctl.shipping.chunks import printable
from csdctl.shipping.deliver import Delivery, DeliveryProgress
from csdctl.shipping.payload import FileTree, TreeRequest
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.view import View, new_progress, text_column
from csdctl.transport.many import Outcome

MAX_BARS = 10
"""The most bars of single nodes, below the bar of the whole fleet."""


class DeployView(View):
    """A bar for the fleet and one for each active node on a terminal, a line for each node elsewhere."""

    def __init__(self, console: PrintableConsole, *, num_nodes: int, dry_run: bool = False) -> None:
        self._console = console
        self._num_nodes = num_nodes
        self._num_done = 0
        self._dry_run = dry_run
        self._bars: dict[str, TaskID] = {}
        self._bytes: dict[str, DeliveryProgress] = {}
        title = text_column("{task.description}")
        columns = (title, BarColumn(), DownloadColumn(True), TransferSpeedColumn())
        self._progress = new_progress(console, *columns)
        super().__init__(self._progress)
        self._fleet = self._progress.add_task(self._title(), total=None)

    def packed(self, request: TreeRequest, tree: FileTree) -> None:
        """Print the size of a tree that was read."""
        size = f"{len(tree.files):,} files ({format_bytes(tree.num_bytes)})"
        self._print(f"{printable(str(request.source))}: {size} for {printable(tree.destination)}")

    def advance(self, progress: DeliveryProgress) -> None:
        """Show the progress of a node; may be called from any thread."""
        if not self._console.is_terminal:
            return
        self._bytes[progress.node] = progress
        if progress.node not in self._bars and len(self._bars) < MAX_BARS:
            self._bars[progress.node] = self._progress.add_task(progress.node, total=progress.bytes_total)
        if progress.node in self._bars:
            self._progress.update(
                self._bars[progress.node],
                completed=progress.bytes_sent,
                total=progress.bytes_total,
            )
        self._show_fleet()

    def finish(self, outcome: Outcome[Delivery]) -> None:
        """Show that a node is done, or failed."""
        self._num_done += 1
        if outcome.name in self._bars:
            self._progress.remove_task(self._bars.pop(outcome.name))
        self._show_fleet()
        if not self._console.is_terminal:
            self._print(self._describe(outcome))

    def _show_fleet(self) -> None:
        known = list(self._bytes.values())
        self._progress.update(
            self._fleet,
            description=self._title(),
            completed=sum(progress.bytes_sent for progress in known),
            total=sum(progress.bytes_total for progress in known) or None,
        )

    def _title(self) -> str:
        return f"{self._num_done} of {self._num_nodes} nodes"

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def _describe(self, outcome: Outcome[Delivery]) -> str:
        if outcome.value is None:
            return f"{outcome.name}: failed"
        sent = "would be sent" if self._dry_run else "sent"
        return (
            f"{outcome.name}: {outcome.value.num_sent:,} files {sent} "
            f"({format_bytes(outcome.value.bytes_sent)}), {outcome.value.num_present:,} already there"
        )


def render_deliveries(
    console: PrintableConsole, outcomes: Mapping[str, Outcome[Delivery]], *, dry_run: bool
) -> None:
    """Print a row for each node: what was sent to it, or would be."""
    table = Table(box=box.SIMPLE)
    table.add_column("node", no_wrap=True)
    for column in ("would be sent" if dry_run else "sent", "bytes", "already there"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, outcome in outcomes.items():
        if outcome.value is None:
            table.add_row(name, Text("failed", "red"), "", "")
            continue
        table.add_row(
            name,
            f"{outcome.value.num_sent:,}",
            format_bytes(outcome.value.bytes_sent),
            f"{outcome.value.num_present:,}",
        )
    console.print(table)
