"""Work on all nodes at once: its progress, its results, and why nodes failed. Exec, deploy and provision."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from csdctl.errors import CsdctlError
from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import classify_machine
from csdctl.fleet.model import Fleet, fold_problems
from csdctl.fleet.names import fold_names, format_node_names
from csdctl.reporting.numbers import format_bytes, format_count
from csdctl.shipping.deliver import Delivery, DeliveryProgress, FileTree, TreeRequest
from csdctl.terminal.console import PrintableConsole, View, build_table
from csdctl.terminal.streams import Streams, document, fields_of
from csdctl.transport.many import Outcome, errors_of
from csdctl.workflows.exec.run_command import Answer, ExecResult
from csdctl.workflows.provision.bundle import Bundle, ProvisionRequest
from csdctl.workflows.provision.provision import Provisioned, Sent, TaskResult

MAX_LINES = 20
"""The most problems, and the most notes, to print: a thousand nodes must not scroll everything else away."""
MAX_ANSWERS = 5 * MAX_LINES
"""The most different answers of a command to print."""
MAX_OUTPUT_LINES = 200
"""The most lines of one answer to print on a terminal."""
ItemT = TypeVar("ItemT")


class CountView(View):
    """Counts machines that are done, on a terminal. Elsewhere prints a line of each. A context manager."""

    def __init__(self, console: PrintableConsole, doing: str, num_machines: int) -> None:
        self._num_failed = 0
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            TextColumn("{task.fields[size]}", markup=False),
            TextColumn("{task.fields[failed]}", style="red", markup=False),
        )
        super().__init__(console, lambda: self._progress)
        self._task = self._progress.add_task(doing, total=num_machines, failed="", size="")

    def count(self, line: str = "", *, has_failed: bool = False) -> None:
        """Count one machine. Print `line` where there is no terminal."""
        self._num_failed += has_failed
        failed = f"{self._num_failed} failed" if self._num_failed else ""
        self._progress.update(self._task, advance=1, failed=failed)
        if line and not self._console.is_terminal:
            self._print(line)

    def show(self, outcome: Outcome[Answer]) -> None:
        """Count a machine that has run a command."""
        self.count(has_failed=outcome.value is None or outcome.value.has_failed)

    def take(self, facts: Facts) -> None:
        """Count a machine that has been probed."""
        result = facts.problem or classify_machine(facts).name
        self.count(f"{facts.name}: {result}", has_failed=facts.problem is not None)


def render_failed(console: PrintableConsole, failed: Mapping[str, CsdctlError], fleet: Fleet) -> None:
    """Print why machines failed, and the remedies. The same cause on many machines is one problem."""
    for problem in bounded(console, fold_problems(failed, fleet), "problems"):
        console.print("problem:", style="bold red", end=" ")
        console.print(f"{format_node_names(problem.names)}: {problem.message}", soft_wrap=True)
        if problem.remedy:
            console.print(f"  → {problem.remedy}", soft_wrap=True)


def bounded(console: PrintableConsole, items: Sequence[ItemT], what: str) -> Iterator[ItemT]:
    """Yield the first of `items`, then print a line that counts the remaining ones."""
    yield from items[:MAX_LINES]
    if len(items) > MAX_LINES:
        console.print(f"… and {len(items) - MAX_LINES} more {what}; --json lists them all")


def render_answers(streams: Streams, result: ExecResult) -> None:
    """Print each different answer under the names of its machines, then why machines did not answer."""
    rows = result.rows
    for answer, names in rows[:MAX_ANSWERS]:
        title = f"{format_node_names(names)} ({len(names)})" if len(names) > 1 else names[0]
        failure = f": exit code {answer.exit_code}" if answer.has_failed else ""
        streams.console.print(f"{title}{failure}", style="bold red" if failure else "bold", soft_wrap=True)
        _print_output(streams.console, answer.stdout)
        if answer.stderr:
            streams.errors.print(f"{title}, standard error", style="yellow", soft_wrap=True)
            _print_output(streams.errors, answer.stderr)
        if answer.error:
            streams.errors.print(f"  {answer.error}", style="red", soft_wrap=True)
        if answer.num_dropped:
            streams.errors.print(f"  … {answer.num_dropped:,} bytes of output were dropped")
    if len(rows) > MAX_ANSWERS:
        streams.errors.print(f"… and {len(rows) - MAX_ANSWERS} more answers; --json lists them all")
    render_failed(streams.console, errors_of(result.outcomes), result.fleet)


def _print_output(console: PrintableConsole, output: bytes) -> None:
    """Print text of a machine, indented, so that no line of it passes for csdctl's."""
    lines = output.decode(errors="replace").splitlines()
    most = MAX_OUTPUT_LINES if console.is_terminal else len(lines)
    for line in lines[:most]:
        console.print(f"  {line}", soft_wrap=True)
    if len(lines) > most:
        console.print(f"  … and {len(lines) - most} more lines; --json has them")


def exec_document(result: ExecResult, command: Sequence[str], task: str | None = None) -> dict[str, object]:
    """Return the `csdctl.exec/1` document. Bytes that are not UTF-8 are replaced."""
    without_answer = {"exit_code": None, "row": None, "duration_s": None}
    machines: dict[str, Mapping[str, object]] = dict.fromkeys(result.outcomes, without_answer)
    rows: list[dict[str, object]] = []
    for number, (answer, names) in enumerate(result.rows):
        rows.append(
            {
                "machines": fold_names(names),
                "exit_code": answer.exit_code,
                "stdout": answer.stdout.decode(errors="replace"),
                "stderr": answer.stderr.decode(errors="replace"),
                "error": answer.error or None,
                "num_dropped_bytes": answer.num_dropped,
            }
        )
        for name in names:
            duration_s = result.answers[name].duration_s
            machines[name] = {"exit_code": answer.exit_code, "row": number, "duration_s": duration_s}
    return document(
        "csdctl.exec/1",
        fleet=result.fleet.path,
        emulated=result.fleet.emulated,
        task=task,
        command=command,
        rows=rows,
        machines=[{"name": name, **content} for name, content in machines.items()],
        failed=result.failed,
    )


class TransferView(CountView):
    """The nodes that have their files, and the bytes sent to all of them. A context manager."""

    def __init__(self, console: PrintableConsole, num_nodes: int, *, is_dry_run: bool = False) -> None:
        super().__init__(console, "sending", num_nodes)
        self._is_dry_run = is_dry_run
        self._bytes: dict[str, DeliveryProgress] = {}

    def advance(self, progress: DeliveryProgress) -> None:
        """Show the bytes that were sent. May be called from any thread."""
        self._bytes[progress.node] = progress
        nodes = list(self._bytes.values())
        sent, total = sum(node.bytes_sent for node in nodes), sum(node.bytes_total for node in nodes)
        self._progress.update(self._task, size=f"{format_bytes(sent)} of {format_bytes(total)}")

    def packed(self, request: TreeRequest, tree: FileTree) -> None:
        """Print the size of a tree that was read."""
        size = f"{format_count(tree.files, 'file')} ({format_bytes(tree.num_bytes)})"
        self._print(f"{request.source}: {size} for {tree.destination}")

    def finish(self, outcome: Outcome[Delivery]) -> None:
        """Print what a node got, or that it failed."""
        line = f"{outcome.name}: failed"
        if done := outcome.value:
            sent = f"{format_count(done.num_sent, 'file')} {'would be sent' if self._is_dry_run else 'sent'}"
            size = format_bytes(done.bytes_sent)
            line = f"{outcome.name}: {sent} ({size}), {done.num_present:,} already there"
        self._print(line)
        self.count(has_failed=not outcome.value)

    def sent(self, outcome: Outcome[Sent]) -> None:
        """Count a node that has its bundle."""
        line = ""
        if sent := outcome.value:
            files = f": {format_count(sent.num_files, 'file')} ({format_bytes(sent.num_bytes)}) missing there"
            state = " is installed: nothing to send" if sent.is_installed else files
            line = f"{outcome.name}: bundle {sent.bundle_id}{state}"
        self.count(line, has_failed=not outcome.value)

    def task(self, result: TaskResult) -> None:
        """Show the task that runs. Print those that change something where there is no terminal."""
        if self._console.is_terminal:
            self._progress.update(self._task, description=f"{result.task}: {result.node}", total=None)
        elif result.state not in ("ok", "skipped"):
            self._print(f"{result.node}: {result.state}: {result.task}")


def render_provisioned(
    console: PrintableConsole, outcomes: Mapping[str, Outcome[Provisioned]], request: ProvisionRequest
) -> None:
    """Print a row for each node."""
    rows: list[tuple[str | Text, ...]] = []
    for name, outcome in outcomes.items():
        if (done := outcome.value) is None:
            rows.append((name, "", Text("failed", "red"), "", ""))
            continue
        counts = (str(done.summary.ok), str(done.summary.changed)) if done.summary else ("–", "–")
        kind = done.machine.kind.architecture if done.machine else ""
        rows.append((name, kind, format_bytes(done.sent.num_bytes) if done.sent else "–", *counts))
    would = "would be " if request.is_dry_run else ""
    columns = ("node", ">processor", f">{would}sent", ">tasks ok", f">{would}changed")
    console.print(build_table(columns, rows))
    installed = [outcome.value for outcome in outcomes.values() if outcome.value]
    if request.sends_only:
        return
    if request.is_dry_run:
        if not all(node.summary for node in installed):
            line = "–: Ansible checks once the files are there; docs/how-to/provision.md lists the changes"
            console.print(line, soft_wrap=True)
    elif any(node.sent for node in installed):
        python = f"{request.prefix}/venv/bin/python"
        console.print(f"In the fleet file, set `python: {python}` for these nodes.", soft_wrap=True)


def provision_document(
    outcomes: Mapping[str, Outcome[Provisioned]], request: ProvisionRequest
) -> dict[str, object]:
    """Return the `csdctl.provision/1` document."""
    nodes = {
        name: {
            "architecture": node.machine.kind.architecture if node.machine else None,
            **(fields_of(node.sent) if node.sent else {"num_bytes": 0}),
            "tasks": node.summary,
        }
        for name, outcome in outcomes.items()
        if (node := outcome.value)
    }
    return document(
        "csdctl.provision/1",
        is_dry_run=request.is_dry_run,
        prefix=request.prefix,
        nodes=nodes,
        failed=errors_of(outcomes),
    )


def collected_document(bundles: Sequence[Bundle]) -> dict[str, object]:
    """Return the `csdctl.bundles/1` document."""
    names = ("id", "kind", "directory", "num_bytes", "files")
    described = [
        {name: getattr(bundle, name) for name in names}
        | {"needed_bytes": bundle.needed_bytes + bundle.wheel_bytes}
        for bundle in bundles
    ]
    return document("csdctl.bundles/1", bundles=described)
