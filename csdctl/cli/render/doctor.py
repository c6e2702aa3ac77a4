"""The checks and settings of `doctor`: a table that fills on a terminal, plain lines elsewhere, and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.view import View, live_on
from csdctl.fleet.checks import FLEET_NAME, Check, Status, fold
from csdctl.fleet.model import Fleet, Host
from csdctl.reporting.numbers import format_count
from csdctl.workflows.preflight.doctor import Examination, describe

MAX_ROWS = 40
"""With more machines than this, only those with a warning or a failure have a row."""

COLUMNS = {
    "reach": ("reach", "probe", "deploy"),
    "software": ("Python", "packages", "MPI", "mpirun", "prefix", "glibc", "imports"),
    "system": ("processor", "memory", "clock", "hostname", "open files"),
    "disk": ("disk", "TMPDIR"),
    "network": ("network", "ports", "listeners"),
    "sandbox": ("sandbox",),
    "allreduce": ("allreduce",),
}
"""The columns of the table, and the checks that each one covers."""

_CELLS = {Status.OK: Text("ok"), Status.WARN: Text("amber", "yellow"), Status.FAIL: Text("red", "bold red")}
_SEVERITY = list(Status)
_SETTINGS = ("fleet", "deadline", "connect_deadline", "mpi_deadline", "limit", "exclude", "job")
_SOURCES = {
    "COMMANDLINE": "flag",
    "ENVIRONMENT": "environment",
    "DEFAULT": "default",
    "DEFAULT_MAP": "file config.yaml",
}


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
            self._print(f"{_color_of(check.status)}: {check.machine}: {describe(check)}")

    def finish(self, examination: Examination) -> None:
        """Print the settings, the table, and every check that is not ok with its remedy."""
        self._show_settings()
        self._console.print(self._table())
        shown = [check for check in self._checks if self._is_verbose or check.status != Status.OK]
        shown += [check for check in self._checks if check.check == "allreduce" and check not in shown]
        for check, machines in fold(sorted(shown, key=lambda check: _SEVERITY.index(check.status))):
            style = {Status.FAIL: "bold red", Status.WARN: "yellow"}.get(check.status)
            self._console.print(f"{_color_of(check.status)}:", style=style, end=" ")
            self._print(f"{_names(machines)}: {describe(check)}")
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
        table = Table(title="settings", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in ("setting", "value", "from"):
            table.add_column(column, overflow="fold")
        for setting in shown:
            table.add_row(setting.name, setting.value or "–", setting.source)
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
            table.add_row(name, *(_CELLS[row[column]] if column in row else "–" for column in COLUMNS))
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


def _color_of(status: Status) -> str:
    return {Status.OK: "ok", Status.WARN: "amber", Status.FAIL: "red"}[status]


def _is_green(row: dict[str, Status]) -> bool:
    return bool(row) and all(status == Status.OK for status in row.values())


def _names(machines: Sequence[str]) -> str:
    """Return all names, or the first names and the number of the others."""
    return ", ".join(machines[:6]) + (f" and {len(machines) - 6} more" if len(machines) > 6 else "")


def list_settings(context: typer.Context, fleet: Fleet) -> list[Setting]:
    """Return the settings of one invocation, and those of the fleet file that apply to all machines."""
    parameters = {parameter.name: parameter for parameter in context.command.params}
    settings = []
    for name in _SETTINGS:
        value = context.params[name]
        if value is None or name not in parameters:
            continue
        text = ",".join(value) if isinstance(value, list | tuple) else str(value)
        settings.append(Setting(name.replace("_", "-"), text, _source(context, parameters[name], name)))
    in_file = {
        "network": (fleet.network, fleet.network != ""),
        "host.threads": (str(fleet.host.threads), fleet.host != Host()),
    }
    for name, (text, is_set) in in_file.items():
        settings.append(Setting(name, text, f"file {fleet.path}" if is_set else "default"))
    return settings


def _source(context: typer.Context, parameter: object, name: str) -> str:
    source = context.get_parameter_source(name)
    word = _SOURCES.get(source.name, source.name.lower()) if source else "default"
    if word == "environment":
        return f"environment {getattr(parameter, 'envvar', '')}"
    return f"flag {getattr(parameter, 'opts', [''])[0]}" if word == "flag" else word
