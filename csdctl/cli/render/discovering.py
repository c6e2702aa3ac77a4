"""`discover` while it runs: a progress bar on a terminal, a line for each machine elsewhere."""

from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.view import View, new_progress, text_column
from csdctl.fleet.facts import Facts


class DiscoverView(View):
    """Shows each machine when it responds or fails; a context manager."""

    def __init__(self, console: PrintableConsole, num_machines: int) -> None:
        self._console = console
        self._num_failed = 0
        problems = text_column("{task.fields[failed]}", style="red")
        bar = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = new_progress(console, *bar, problems)
        super().__init__(self._progress)
        self._task = self._progress.add_task("probing", total=num_machines, failed="")

    def show(self, facts: Facts) -> None:
        """Show one machine."""
        self._num_failed += facts.problem is not None
        if self._console.is_terminal:
            failed = f"{self._num_failed} failed" if self._num_failed else ""
            self._progress.update(self._task, advance=1, failed=failed)
        else:
            self._console.print(f"{facts.name}: {_describe(facts)}", soft_wrap=True)


def _describe(facts: Facts) -> str:
    if facts.problem:
        return facts.problem
    cores = f"{facts.num_cores} cores" if facts.num_cores else ""
    return ", ".join(filter(None, [facts.architecture, facts.cpu_model, cores]))
