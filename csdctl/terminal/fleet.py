"""The machines of a fleet: their facts, host keys and leftovers, and emulated nodes. As tables and JSON."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table
from rich.text import Text

from csdctl.emulation.fleet import NodeStatus
from csdctl.errors import CsdctlError
from csdctl.fleet.checks import FLEET_NAME, Check, Status, fold
from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import EqualMachines, find_differences, group_machines
from csdctl.fleet.model import Fleet, fold_problems
from csdctl.fleet.names import fold_names, format_node_names, names_by_value
from csdctl.launch.leftovers import Leftovers
from csdctl.reporting.numbers import format_bytes, format_count
from csdctl.terminal.console import PrintableConsole, View, build_table
from csdctl.terminal.nodes import bounded, render_failed
from csdctl.terminal.streams import Streams, document, fields_of
from csdctl.transport.many import Outcome, errors_of
from csdctl.workflows.discovery.discover import COPIED_KEY, DiscoverResult, ShownKey, find_shared
from csdctl.workflows.discovery.inventory import FoundFleet
from csdctl.workflows.preflight.examination import Examination, describe

COLUMNS = {
    "reach": ("reach", "probe", "deploy"),
    "software": ("Python", "packages", "MPI", "mpirun", "glibc"),
    "system": ("processor", "memory", "clock", "limits"),
    "disk": ("disk", "TMPDIR"),
    "network": ("network",),
    "sandbox": ("sandbox",),
    "link": ("link", "sum"),
}
"""The columns of the table, and the checks that each one covers."""

COLORS = {Status.OK: Text("ok"), Status.WARN: Text("amber", "yellow"), Status.FAIL: Text("red", "bold red")}
"""How a status is printed."""
SEVERITY = list(Status)
"""From the best status to the worst."""
UNKNOWN = "–"
MISSING = "missing"
MAX_ROWS = 40
"""Of more machines than this, those that are green have no row."""


class ExaminationView(View):
    """Shows each check when it is done. Use it as a context manager around the examination."""

    def __init__(self, console: PrintableConsole, fleet: Fleet, *, is_verbose: bool = False) -> None:
        self._is_verbose = is_verbose
        self._title = f"fleet {fleet.path}" + (" (emulated fleet)" if fleet.emulated else "")
        self._machines = [*fleet.machines, FLEET_NAME]
        self._checks: list[Check] = []
        super().__init__(console, self._table)

    def show(self, check: Check) -> None:
        """Add one check."""
        self._checks.append(check)
        if self._live is None and check.status != Status.OK:
            self._print(f"{COLORS[check.status]}: {check.machine}: {describe(check)}")

    def finish(self, examination: Examination) -> None:
        """Print the table, and every check that is not ok with its remedy."""
        self._console.print(self._table())
        checks = [
            check
            for check in self._checks
            if self._is_verbose or check.status != Status.OK or check.check == "sum"
        ]
        for check, machines in fold(sorted(checks, key=lambda check: SEVERITY.index(check.status))):
            self._console.print(COLORS[check.status], end=": ")
            self._print(f"{format_node_names(machines)}: {describe(check)}")
            if check.remedy:
                self._print(f"  → {check.remedy}")
        if not examination.red and not examination.overdue:
            warnings = [check for check in self._checks if check.status == Status.WARN]
            self._print("fit to train" + (f", with {format_count(warnings, 'warning')}" if warnings else ""))

    def _table(self) -> Table:
        worst: dict[str, dict[str, Status]] = {name: {} for name in self._machines}
        column_of = {name: column for column, names in COLUMNS.items() for name in names}
        for check in self._checks:
            row, column = worst.setdefault(check.machine, {}), column_of.get(check.check, "system")
            row[column] = max(row.get(column, Status.OK), check.status, key=SEVERITY.index)
        rows = {
            name: row
            for name, row in worst.items()
            if len(worst) <= MAX_ROWS or {*row.values()} != {Status.OK}
        }
        cells = [
            (name, *(COLORS[row[column]] if column in row else "–" for column in COLUMNS))
            for name, row in rows.items()
        ]
        table = build_table(("machine", *COLUMNS), cells, title=self._title)
        if len(rows) < len(worst):
            table.caption = f"{len(worst) - len(rows)} more machines are green"
        return table


def doctor_document(examination: Examination) -> dict[str, object]:
    """Return the `csdctl.doctor/1` document."""
    return document(
        "csdctl.doctor/1",
        fleet=examination.fleet.path,
        emulated=examination.fleet.emulated,
        is_fit=not examination.red and not examination.overdue,
        overdue=examination.overdue or None,
        checks=examination.checks,
        failed=examination.red,
    )


def render_fleet(console: PrintableConsole, result: DiscoverResult, *, verbose: bool) -> None:
    """Print a row for each group of equal machines (`verbose`: for each machine), then problems and notes."""
    title = f"fleet {result.fleet.path}" + (" (emulated fleet)" if result.fleet.emulated else "")
    groups = group_machines(result.facts.values())
    rows: list[EqualMachines] = [(facts,) for group in groups for facts in group] if verbose else groups
    console.print(_tabulate_facts(title, rows))
    render_failed(console, result.failed, result.fleet)
    differences = find_differences(groups).items()
    lines = [f"differs: {format_node_names(_names(group))}: {how}" for group, how in differences]
    lines += [
        f"drive: {name} is {drive.device} ({drive.model}, serial {drive.serial})"
        for name, drive in result.drives.items()
    ]
    notes = names_by_value((name, note) for name, facts in result.facts.items() for note in facts.notes)
    lines += [f"note: {format_node_names(names)}: {note}" for note, names in notes.items()]
    lines += [f"warning: {warning}" for warning in result.warnings]
    for line in bounded(console, lines, "notes"):
        console.print(line, soft_wrap=True)
    console.print(f"facts: {result.path}", soft_wrap=True)


def discover_document(result: DiscoverResult) -> dict[str, object]:
    """Return the `csdctl.discover/1` document."""
    groups = group_machines(result.facts.values())
    differences = find_differences(groups)
    return document(
        "csdctl.discover/1",
        fleet=result.fleet.path,
        emulated=result.fleet.emulated,
        machines=[
            {**fields_of(facts), "remedy": result.failed[name].remedy if name in result.failed else None}
            for name, facts in result.facts.items()
        ],
        groups=[
            {
                "machines": _names(group),
                "ranges": fold_names(_names(group)),
                "differs": differences.get(group),
            }
            for group in groups
        ],
        problems=fold_problems(result.failed, result.fleet),
        drives=result.drives,
        warnings=result.warnings,
        failed=result.failed,
    )


def show_imported(streams: Streams, result: FoundFleet, source: str, *, is_dry_run: bool) -> None:
    """Report the fleet file that was written from `source`. In a dry run print what it would hold."""
    for warning in result.warnings:
        streams.errors.print(f"warning: {warning}")
    if not is_dry_run:
        fleet = result.fleet
        streams.say(f"{format_count(fleet.nodes, 'machine')} found in {source}: {fleet.path} written")
    elif streams.is_json:
        streams.result(fleet_document(result.fleet))
    else:
        streams.write(result.text)


def fleet_document(fleet: Fleet) -> dict[str, object]:
    """Return the `csdctl.inventory/1` document: the nodes as the fleet file lists them."""
    return document(
        "csdctl.inventory/1",
        fleet=fleet.path,
        network=fleet.network,
        emulated=fleet.emulated,
        nodes=fleet.nodes,
    )


def _names(group: EqualMachines) -> list[str]:
    return [facts.name for facts in group]


def _least(sizes: Iterable[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _tabulate_facts(title: str, groups: Sequence[EqualMachines]) -> Table:
    rows = [
        (
            format_node_names(_names(group)) + (f" ({len(group)})" if len(group) > 1 else ""),
            _describe_processors(group[0]),
            _describe_cores(group[0]),
            format_bytes(_least(facts.memory_limit_bytes or facts.memory_bytes for facts in group)),
            format_bytes(_least(facts.disk_free_bytes for facts in group)),
            group[0].python_version or MISSING,
            group[0].tensorflow_version or MISSING,
            group[0].mpi_version or MISSING,
        )
        for group in groups
    ]
    columns = ("machines", "CPU", ">cores", ">memory", ">disk", "Python", "Tensor\nFlow", "MPI")
    table = build_table(columns, rows, title=title)
    longest = max((len(row[0]) for row in rows), default=0)
    table.columns[0].min_width = max(len("machines"), min(longest, 15))  # fits 80 columns
    return table


def _describe_processors(facts: Facts) -> str:
    parts = [facts.cpu_model or facts.architecture or UNKNOWN]
    if facts.accelerator:
        size = facts.accelerator_memory_bytes
        parts.append(f"{facts.accelerator} ({format_bytes(size)})" if size else facts.accelerator)
    return " + ".join(parts)


def _describe_cores(facts: Facts) -> str:
    cores = UNKNOWN if facts.num_cores is None else str(facts.num_cores)
    return f"{facts.cpu_limit:g} of {cores}" if facts.cpu_limit else cores


@dataclass
class TrustScreen:
    """Shows the keys of each layer of machines in turn, asks for confirmation, and collects them all."""

    streams: Streams
    fleet: Fleet
    yes: bool = False
    is_dry_run: bool = False
    keys: dict[str, ShownKey] = field(default_factory=dict)
    failed: dict[str, CsdctlError] = field(default_factory=dict)

    def show(
        self, outcomes: Mapping[str, Outcome[ShownKey]], new: Sequence[ShownKey], closed: Sequence[str]
    ) -> None:
        """Print new keys and machines that failed, and ask whether to accept the keys.

        `closed`: machines that a dry run cannot ask. Raises InputError unless the answer is yes.
        """
        if closed:
            self.streams.say(f"{', '.join(closed)}: skipped: key of the jump host not accepted yet")
        keys = {name: outcome.value for name, outcome in outcomes.items() if outcome.value}
        failed = errors_of(outcomes)
        self.keys |= keys
        self.failed |= failed
        if new:
            rows = [
                (key.node.name, f"{key.node.address} port {key.node.port}", key.type, key.fingerprint)
                for key in new
            ]
            columns = ("machine", "address", "type", "fingerprint")
            title = f"new host keys of {format_node_names(key.node.name for key in new)}"
            self.streams.console.print(build_table(columns, rows, title=title))
        if num_accepted := len(keys) - len(new):
            self.streams.say(f"{format_count(num_accepted, 'key')} already accepted")
        fingerprints = ((name, key.fingerprint) for name, key in keys.items())
        for warning in find_shared("host key", fingerprints, COPIED_KEY):
            self.streams.say(f"warning: {warning}")
        render_failed(self.streams.console, failed, self.fleet)
        if new and not self.is_dry_run:
            self.streams.confirm(f"Accept {format_count(new, 'new key')}?", yes=self.yes)

    def show_forgotten(self, removed: Mapping[str, int]) -> None:
        """Print how many keys of each machine were deleted."""
        done = "would be deleted" if self.is_dry_run else "deleted"
        for name, number in removed.items():
            self.streams.say(f"{name}: {format_count(number, 'key')} {done}")
        self.streams.result(document("csdctl.trust/1", is_dry_run=self.is_dry_run, forgotten=removed))

    def build_document(self) -> dict[str, object]:
        """Return the `csdctl.trust/1` document."""
        machines = {
            name: {
                "address": key.node.address,
                "port": key.node.port,
                **{part: getattr(key, part) for part in ("type", "fingerprint", "state")},
            }
            for name, key in self.keys.items()
        }
        return document("csdctl.trust/1", is_dry_run=self.is_dry_run, machines=machines, failed=self.failed)


def show_started(
    streams: Streams, path: Path, nodes: Sequence[NodeStatus], *, was_up: bool, owner_pid: int | None
) -> None:
    """Print what `emulate up` started, or found running. The process `owner_pid` ends it with its own end."""
    if streams.is_json:
        state = {"fleet_path": path, "nodes": nodes, "was_up": was_up, "owner_pid": owner_pid}
        streams.result(document("csdctl.emulate/1", emulated=True) | state)
        return
    render_nodes(streams.console, nodes)
    streams.say(f"Emulated fleet {'was already up' if was_up else 'is up'}: {path}")
    if owner_pid not in (None, os.getpid()):  # the demo need not speak of itself
        streams.say(f"It ends when process {owner_pid} ends.")


def show_status(streams: Streams, nodes: Sequence[NodeStatus]) -> None:
    """Print the state of the emulated nodes."""
    if streams.is_json:
        streams.result(document("csdctl.emulate/1", emulated=True, nodes=nodes))
    elif not nodes:
        streams.say("no emulated fleet; `csdctl emulate up` starts one")
    else:
        render_nodes(streams.console, nodes)


def show_stopped(streams: Streams, num_processes: int) -> None:
    """Print what `emulate down` ended."""
    if streams.is_json:
        streams.result(document("csdctl.emulate/1", emulated=True, nodes=[], num_processes=num_processes))
        return
    streams.say(f"Emulated fleet is down: {format_count(num_processes, 'process')} ended")


def render_nodes(console: PrintableConsole, nodes: Sequence[NodeStatus]) -> None:
    """Print a row for each node."""
    rows = [
        (
            node.name,
            str(node.port),
            "running" if node.is_running else "ended",
            str(node.num_processes),
            f"{node.cpu_limit:g} cores ({node.cpu_mechanism})",
            f"{format_bytes(node.memory_bytes)} of {format_bytes(node.memory_limit_bytes)}",
        )
        for node in nodes
    ]
    columns = ("node", "port", "state", "processes", "CPU limit", "memory")
    console.print(build_table(columns, rows, title="emulated"))


def render_cleaned(console: PrintableConsole, outcome: Outcome[Leftovers], *, is_dry: bool) -> None:
    """Print one line for a machine, unless it failed."""
    if outcome.error:
        return
    leftovers = outcome.get()
    parts = []
    if leftovers.num_processes:
        runs = f" of run {', '.join(leftovers.runs)}" if leftovers.runs else ""
        ended = "still running" if is_dry else "ended"
        parts.append(f"{format_count(leftovers.num_processes, 'process')}{runs} {ended}")
    if leftovers.paths:
        verb = "could be removed" if is_dry else "removed"
        paths = format_count(leftovers.paths, "path")
        parts.append(f"{paths} ({format_bytes(leftovers.num_bytes)}) {verb}")
    parts = parts or ["no leftovers"]
    stored = {"features": leftovers.features_bytes, "predictions": leftovers.predictions_bytes}
    if sizes := [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in stored.items() if num_bytes]:
        parts.append(f"stored: {', '.join(sizes)} (--computed removes them)")
    console.print(f"{outcome.name}: {'; '.join(parts)}", soft_wrap=True)
    for path in bounded(console, leftovers.paths if is_dry else (), "paths"):
        console.print(f"  {path}", soft_wrap=True)
