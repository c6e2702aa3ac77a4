"""An examination: a table that fills on a terminal, plain lines elsewhere, a document for programs."""

from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from csdctl.cli.render.view import View, live_on
from csdctl.cli.settings import Setting
from csdctl.fleet.checks import FLEET_NAME, Check, Status, fold
from csdctl.fleet.model import Fleet
from csdctl.workflows.preflight.examination import Examination, describe

SCHEMA = "csdctl.doctor/1"
MAX_ROWS = 40
"""More machines than this: only those that are not green have a row."""

COLUMNS = {
    "reach": ("reach", "probe", "ssh", "deploy"),
    "software": ("Python", "packages", "MPI", "mpirun", "prefix", "glibc"),
    "system": ("processor", "memory", "clock", "hostname", "open files"),
    "disk": ("disk", "TMPDIR"),
    "network": ("network", "ports"),
    "mpi": ("mpi",),
}
"""The table's columns, and the checks that each stands for."""

_WORDS = {Status.OK: "ok", Status.WARN: "[yellow]amber[/yellow]", Status.FAIL: "[bold red]red[/bold red]"}
_SEVERITY = list(Status)


class ExaminationView(View):
    """Shows checks as they come; use as a context manager around the examination."""

    def __init__(
        self, console: Console, fleet: Fleet, settings: Sequence[Setting], *, is_verbose: bool = False
    ) -> None:
        self._console = console
        self._is_verbose = is_verbose
        self._settings = settings
        self._title = f"fleet {fleet.path}" + (" (emulated fleet)" if fleet.emulated else "")
        self._machines = [*fleet.machines, FLEET_NAME]
        self._checks: list[Check] = []
        self._live = live_on(console, self._table)
        super().__init__(self._live)

    def show(self, check: Check) -> None:
        """Take one check in."""
        self._checks.append(check)
        if self._live is None and check.status != Status.OK:
            self._say(f"{_plain(check.status)}: {check.machine}: {describe(check)}")

    def finish(self, examination: Examination) -> None:
        """The table, what is not green with its remedies, and the settings in force."""
        self._show_settings()
        self._console.print(self._table())
        shown = [one for one in self._checks if self._is_verbose or one.status != Status.OK]
        shown += [one for one in self._checks if one.check == "mpi" and one not in shown]
        for check, machines in fold(sorted(shown, key=lambda one: _SEVERITY.index(one.status))):
            style = {Status.FAIL: "bold red", Status.WARN: "yellow"}.get(check.status)
            self._console.print(f"{_plain(check.status)}:", style=style, end=" ")
            self._say(f"{_names(machines)}: {describe(check)}")
            if check.remedy:
                self._say(f"  → {check.remedy}")
        if not examination.red and not examination.overdue:
            num_amber = sum(one.status == Status.WARN for one in self._checks)
            self._say("fit to train" + (f", with {num_amber} things to look at" if num_amber else ""))

    def _show_settings(self) -> None:
        """All of them when asked for everything, else those that somebody has set."""
        shown = [one for one in self._settings if self._is_verbose or one.source != "default"]
        if not shown:
            return
        table = Table(title="settings", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in ("setting", "value", "from"):
            table.add_column(column, overflow="fold")
        for one in shown:
            table.add_row(one.name, one.value or "–", one.source)
        self._console.print(table)

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("machine", no_wrap=True)
        for column in COLUMNS:
            table.add_column(column, no_wrap=True)
        worst: dict[str, dict[str, Status]] = {name: {} for name in self._machines}
        column_of = {name: column for column, names in COLUMNS.items() for name in names}
        for check in self._checks:
            row, column = worst.setdefault(check.machine, {}), column_of.get(check.check, "system")
            row[column] = max(row.get(column, Status.OK), check.status, key=_SEVERITY.index)
        rows = {name: row for name, row in worst.items() if len(worst) <= MAX_ROWS or not _is_green(row)}
        for name, row in rows.items():
            table.add_row(name, *(_WORDS[row[column]] if column in row else "–" for column in COLUMNS))
        if len(rows) < len(worst):
            table.caption = f"{len(worst) - len(rows)} more machines are green"
        return table

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def doctor_document(examination: Examination, settings: Sequence[Setting]) -> dict[str, object]:
    """The `csdctl.doctor/1` document."""
    return {
        "schema": SCHEMA,
        "fleet": str(examination.fleet.path),
        "emulated": examination.fleet.emulated,
        "is_fit": not examination.red and not examination.overdue,
        "overdue": examination.overdue or None,
        "checks": [asdict(check) for check in examination.checks],
        "settings": [asdict(setting) for setting in settings],
    }


def _plain(status: Status) -> str:
    return {Status.OK: "ok", Status.WARN: "amber", Status.FAIL: "red"}[status]


def _is_green(row: dict[str, Status]) -> bool:
    return bool(row) and all(status == Status.OK for status in row.values())


def _names(machines: Sequence[str]) -> str:
    """All names, or the first and how many more."""
    return ", ".join(machines[:6]) + (f" and {len(machines) - 6} more" if len(machines) > 6 else "")
