"""The checks and settings of `doctor`: a table that fills on a terminal, plain lines elsewhere, and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from csdctl.fleet.checks import FLEET_NAME, Check, Status, fold
from csdctl.fleet.model import Fleet
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_count
from csdctl.terminal.console import PrintableConsole, build_table
from csdctl.terminal.view import View, live_on
from csdctl.workflows.preflight.doctor import Examination, describe

MAX_ROWS = 40
"""With more machines than this, only those with a warning or a failure have a row."""

COLUMNS = {
    "reach": ("reach", "probe", "deploy"),
    "software": ("Python", "packages", "MPI", "mpirun", "prefix", "glibc"),
    "system": ("processor", "memory", "clock", "hostname", "open files"),
    "disk": ("disk", "TMPDIR"),
    "network": ("network", "ports", "listeners"),
    "sandbox": ("sandbox",),
    "allreduce": ("allreduce",),
}
"""The columns of the table, and the checks that each one covers."""

_COLORS = {Status.OK: Text("ok"), Status.WARN: Text("amber", "yellow"), Status.FAIL: Text("red", "bold red")}
_SEVERITY = list(Status)


@dataclass(frozen=True)
class Setting:
    """A setting in effect; `source` names the flag, the variable or the file."""

    name: str
    value: str
    source: str


class ExaminationView(View):
    """Shows each check when it is done; use it as a context manager around the examination."""

    def __init__(
        self,
        console: PrintableConsole,
        fleet: Fleet,
        settings: Sequence[Setting],
        *,
        is_verbose: bool = False,
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
        """Add one check."""
        self._checks.append(check)
        if self._live is None and check.status != Status.OK:
            self._print(f"{_COLORS[check.status]}: {check.machine}: {describe(check)}")

    def finish(self, examination: Examination) -> None:
        """Print the settings, the table, and every check that is not ok with its remedy."""
        self._show_settings()
        self._console.print(self._table())
        shown = [check for check in self._checks if self._is_verbose or check.status != Status.OK]
        shown += [check for check in self._checks if check.check == "allreduce" and check not in shown]
        for check, machines in fold(sorted(shown, key=lambda check: _SEVERITY.index(check.status))):
            self._console.print(_COLORS[check.status], end=": ")
            self._print(f"{format_node_names(machines)}: {describe(check)}")
            if check.remedy:
                self._print(f"  → {check.remedy}")
        if not examination.red and not examination.overdue:
            warnings = [check for check in self._checks if check.status == Status.WARN]
            self._print("fit to train" + (f", with {format_count(warnings, 'warning')}" if warnings else ""))

    def _show_settings(self) -> None:
        """Print the settings that differ from their defaults; with -v, all settings."""
        shown = [setting for setting in self._settings if self._is_verbose or setting.source != "default"]
        if not shown:
            return
        rows = [(setting.name, setting.value or "–", setting.source) for setting in shown]
        self._console.print(build_table(("~setting", "~value", "~from"), rows, title="settings"))

    def _table(self) -> Table:
        worst: dict[str, dict[str, Status]] = {name: {} for name in self._machines}
        column_of = {name: column for column, names in COLUMNS.items() for name in names}
        for check in self._checks:
            row, column = worst.setdefault(check.machine, {}), column_of.get(check.check, "system")
            row[column] = max(row.get(column, Status.OK), check.status, key=_SEVERITY.index)
        rows = {
            name: row
            for name, row in worst.items()
            if len(worst) <= MAX_ROWS or {*row.values()} != {Status.OK}
        }
        cells = [
            (name, *(_COLORS[row[column]] if column in row else "–" for column in COLUMNS))
            for name, row in rows.items()
        ]
        table = build_table(("machine", *COLUMNS), cells, title=self._title)
        if len(rows) < len(worst):
            table.caption = f"{len(worst) - len(rows)} more machines are green"
        return table

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def doctor_document(examination: Examination, settings: Sequence[Setting]) -> dict[str, object]:
    """Return the `csdctl.doctor/1` document."""
    return {
        "schema": "csdctl.doctor/1",
        "fleet": examination.fleet.path,
        "emulated": examination.fleet.emulated,
        "is_fit": not examination.red and not examination.overdue,
        "overdue": examination.overdue or None,
        "checks": examination.checks,
        "settings": settings,
    }
