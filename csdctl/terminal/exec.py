"""The answers of `exec`: equal ones as one row, standard error on standard error, and JSON."""

from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from csdctl.fleet.names import fold_names, format_node_names
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.problems import MAX_LINES, render_failed
from csdctl.terminal.streams import Streams
from csdctl.terminal.view import View, new_progress, text_column
from csdctl.transport.many import Outcome
from csdctl.workflows.exec.run_command import Answer, ExecResult
from csdctl.workflows.workspace.partial_failure import failed_document

SCHEMA = "csdctl.exec/1"
MAX_SHOWN_LINES = 200
"""Lines of one output of one row; --json has up to 64 KiB."""


class ExecView(View):
    """Counts the machines that have answered, on a terminal; a context manager."""

    def __init__(self, console: PrintableConsole, num_machines: int) -> None:
        self._num_failed = 0
        problems = text_column("{task.fields[failed]}", style="red")
        bar = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = new_progress(console, *bar, problems)
        super().__init__(self._progress)
        self._task = self._progress.add_task("running", total=num_machines, failed="")

    def show(self, outcome: Outcome[tuple[Answer, float]]) -> None:
        """Count one machine."""
        self._num_failed += outcome.value is None or outcome.value[0].has_failed
        failed = f"{self._num_failed} failed" if self._num_failed else ""
        self._progress.update(self._task, advance=1, failed=failed)


def render_answers(streams: Streams, result: ExecResult) -> None:
    """Print each different answer under the names of its machines, then why others did not answer."""
    rows = result.rows
    for answer, names in rows[: MAX_LINES * 5]:
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
            streams.errors.print(f"  … {answer.num_dropped:,} bytes of output were not kept")
    if len(rows) > MAX_LINES * 5:
        streams.errors.print(f"… and {len(rows) - MAX_LINES * 5} more answers; --json lists them all")
    render_failed(streams.console, result.unanswered, result.fleet)


def exec_document(result: ExecResult, command: Sequence[str], task: str | None = None) -> dict[str, object]:
    """Return the `csdctl.exec/1` document; bytes that are not UTF-8 are replaced."""
    rows = result.rows
    row_of = {name: number for number, (_, names) in enumerate(rows) for name in names}
    return {
        "schema": SCHEMA,
        "fleet": str(result.fleet.path),
        "emulated": result.fleet.emulated,
        "task": task,
        "command": list(command),
        "rows": [
            {
                "machines": fold_names(names),
                "exit_code": answer.exit_code,
                "stdout": answer.stdout.decode(errors="replace"),
                "stderr": answer.stderr.decode(errors="replace"),
                "error": answer.error or None,
                "num_dropped_bytes": answer.num_dropped,
            }
            for answer, names in rows
        ],
        "machines": [
            {
                "name": name,
                "exit_code": result.answers[name].exit_code if name in result.answers else None,
                "row": row_of.get(name),
                "duration_s": result.durations_s.get(name),
            }
            for name in result.machines
        ],
        "failed": failed_document(result.failed),
    }


def _print_output(console: PrintableConsole, output: bytes) -> None:
    """Print text of a machine, indented, so that no line of it passes for csdctl's."""
    lines = output.decode(errors="replace").splitlines()
    for line in lines[:MAX_SHOWN_LINES]:
        console.print(f"  {line}", soft_wrap=True)
    if len(lines) > MAX_SHOWN_LINES:
        console.print(f"  … and {len(lines) - MAX_SHOWN_LINES} more lines; --json has them")
