"""`provision` while it runs, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich import box
from rich.progress import BarColumn, DownloadColumn, TaskID
from rich.table import Table
from rich.text import Text

from csdctl.reporting.numbers import format_bytes
from csdctl.shipping.deliver import DeliveryProgress
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.view import View, new_progress, text_column
from csdctl.transport.many import Outcome, errors_of
from csdctl.workflows.provision.bundle import Bundle
from csdctl.workflows.provision.playbook import TaskResult
from csdctl.workflows.provision.provision import Provisioned, ProvisionRequest, Sent
from csdctl.workflows.workspace.partial_failure import failed_document

SCHEMA = "csdctl.provision/1"
COLLECTED_SCHEMA = "csdctl.bundles/1"


class ProvisionView(View):
    """A bar for the bytes and the current task on a terminal, a line for each task elsewhere."""

    def __init__(self, console: PrintableConsole, *, num_nodes: int) -> None:
        self._console = console
        self._num_nodes = num_nodes
        self._num_sent = 0
        self._bytes: dict[str, DeliveryProgress] = {}
        self._task = ""
        self._progress = new_progress(
            console, text_column("{task.description}"), BarColumn(), DownloadColumn(True)
        )
        super().__init__(self._progress)
        self._bar: TaskID = self._progress.add_task("looking at the nodes", total=None)

    def advance(self, progress: DeliveryProgress) -> None:
        """Show the bytes that were sent; may be called from any thread."""
        self._bytes[progress.node] = progress
        known = list(self._bytes.values())
        self._progress.update(
            self._bar,
            description=f"sending: {self._num_sent} of {self._num_nodes} nodes",
            completed=sum(one.bytes_sent for one in known),
            total=sum(one.bytes_total for one in known) or None,
        )

    def sent(self, outcome: Outcome[Sent]) -> None:
        """Count a node that has everything; print it where there is no terminal."""
        self._num_sent += 1
        if outcome.value and not self._console.is_terminal:
            self._console.print(f"{outcome.name}: {describe_sent(outcome.value)}", soft_wrap=True)

    def task(self, result: TaskResult) -> None:
        """Show the task that runs; print those that change something where there is no terminal."""
        if self._console.is_terminal:
            self._progress.update(self._bar, description=f"{result.task}: {result.node}", total=None)
        elif result.state not in ("ok", "skipped"):
            self._console.print(f"{result.node}: {result.state}: {result.task}", soft_wrap=True)


def describe_sent(sent: Sent) -> str:
    """Return what was sent to a node, in words."""
    if sent.is_installed:
        return f"bundle {sent.bundle_id} is installed: nothing to send"
    return f"bundle {sent.bundle_id}: {sent.num_files:,} files ({format_bytes(sent.num_bytes)}) missing there"


def render_nodes(
    console: PrintableConsole, outcomes: Mapping[str, Outcome[Provisioned]], request: ProvisionRequest
) -> None:
    """Print a row for each node."""
    conditional = "would be " if request.is_dry_run else ""
    table = Table(box=box.SIMPLE)
    table.add_column("node", no_wrap=True)
    for column in ("processor", f"{conditional}sent", "tasks ok", f"{conditional}changed"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, outcome in outcomes.items():
        done = outcome.value
        if done is None:
            table.add_row(name, "", Text("failed", "red"), "", "")
            continue
        counts = (str(done.summary.ok), str(done.summary.changed)) if done.summary else ("–", "–")
        kind = done.machine.kind.architecture if done.machine else ""
        table.add_row(name, kind, format_bytes(done.sent.num_bytes) if done.sent else "–", *counts)
    console.print(table)
    if (
        not request.sends_only
        and not request.is_dry_run
        and any(one.value and one.value.sent for one in outcomes.values())
    ):
        console.print(
            f"In the fleet file, set `python: {request.prefix}/venv/bin/python` for these nodes.",
            soft_wrap=True,
        )


def provision_document(
    outcomes: Mapping[str, Outcome[Provisioned]], request: ProvisionRequest
) -> dict[str, object]:
    """Return the `csdctl.provision/1` document."""
    nodes = {}
    for name, outcome in outcomes.items():
        if done := outcome.value:
            nodes[name] = {
                "architecture": done.machine.kind.architecture if done.machine else None,
                **(asdict(done.sent) if done.sent else {"num_bytes": 0}),
                "tasks": asdict(done.summary) if done.summary else None,
            }
    return {
        "schema": SCHEMA,
        "is_dry_run": request.is_dry_run,
        "prefix": request.prefix,
        "nodes": nodes,
        "failed": failed_document(errors_of(outcomes)),
    }


def collected_document(bundles: Sequence[Bundle]) -> dict[str, object]:
    """Return the `csdctl.bundles/1` document."""
    return {
        "schema": COLLECTED_SCHEMA,
        "bundles": [
            {
                "id": bundle.id,
                "kind": asdict(bundle.kind),
                "directory": str(bundle.directory),
                "num_bytes": bundle.num_bytes,
                "needed_bytes": bundle.needed_bytes,
                "files": [asdict(file) for file in bundle.wheels],
            }
            for bundle in bundles
        ],
    }
