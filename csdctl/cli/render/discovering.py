"""`discover` while it runs: a progress bar on a terminal, else a line for each machine as it answers."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from csdctl.cli.render.view import View
from csdctl.fleet.facts import Facts


class DiscoverView(View):
    """Shows machines as they answer; a context manager."""

    def __init__(self, console: Console, num_machines: int) -> None:
        self._console = console
        self._num_failed = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failed]}", style="red"),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        super().__init__(self._progress)
        self._task = self._progress.add_task("asking", total=num_machines, failed="")

    def show(self, facts: Facts) -> None:
        """Take note of one machine."""
        self._num_failed += facts.problem is not None
        if self._console.is_terminal:
            failed = f"{self._num_failed} failed" if self._num_failed else ""
            self._progress.update(self._task, advance=1, failed=failed)
        else:
            self._console.print(f"{facts.name}: {_describe(facts)}", markup=False, soft_wrap=True)


def _describe(facts: Facts) -> str:
    if facts.problem:
        return facts.problem
    cores = f"{facts.num_cores} cores" if facts.num_cores else ""
    return ", ".join(filter(None, [facts.architecture, facts.cpu_model, cores]))
