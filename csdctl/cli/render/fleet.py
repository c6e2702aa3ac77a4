"""The facts that `discover` collected, as tables and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.problems import bounded, render_problems
from csdctl.cli.streams import Streams
from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import EqualMachines, find_differences, group_machines
from csdctl.fleet.model import Fleet, Node
from csdctl.fleet.names import fold_names, format_node_names
from csdctl.reporting.numbers import format_bytes, format_count, format_seconds
from csdctl.workflows.discovery.discover import DiscoverResult
from csdctl.workflows.discovery.inventory import FoundFleet
from csdctl.workflows.workspace.partial_failure import failed_document

SCHEMA = "csdctl.discover/1"
INVENTORY_SCHEMA = "csdctl.inventory/1"
_UNKNOWN = "–"
_MISSING = "missing"
MAX_NAME_WIDTH = 20
"""The width at which the column of machines is folded, so that the table fits 80 columns."""


def render_fleet(console: PrintableConsole, result: DiscoverResult, *, verbose: bool = False) -> None:
    """Print a row for each group of equal machines (`verbose`: for each machine), then problems and notes."""
    title = f"fleet {result.fleet.path}" + (" (emulated fleet)" if result.fleet.emulated else "")
    groups = group_machines(result.facts.values())
    rows = [EqualMachines((facts,)) for group in groups for facts in group.machines] if verbose else groups
    console.print(_build_table(title, rows))
    if verbose:
        console.print(_build_details(result.facts))
    render_problems(console, result.problems)
    lines = [f"differs: {format_node_names(group.names)}: {how}" for group, how in find_differences(groups)]
    lines += [
        f"drive: {name} is {drive.device} ({drive.model}, serial {drive.serial})"
        for name, drive in result.drives.items()
    ]
    lines += [
        f"note: {format_node_names(names)}: {note}" for note, names in _fold_notes(result.facts).items()
    ]
    lines += [f"warning: {warning}" for warning in result.warnings]
    for line in bounded(console, lines, "notes"):
        console.print(line, soft_wrap=True)
    console.print(f"facts: {result.path}", soft_wrap=True)


def discover_document(result: DiscoverResult) -> dict[str, object]:
    """Return the `csdctl.discover/1` document."""
    groups = group_machines(result.facts.values())
    differences = dict(find_differences(groups))
    return {
        "schema": SCHEMA,
        "fleet": str(result.fleet.path),
        "emulated": result.fleet.emulated,
        "machines": [
            {**asdict(facts), "remedy": result.failed[name].remedy if name in result.failed else None}
            for name, facts in result.facts.items()
        ],
        "groups": [
            {"machines": group.names, "ranges": fold_names(group.names), "differs": differences.get(group)}
            for group in groups
        ],
        "problems": [asdict(problem) for problem in result.problems],
        "drives": {name: asdict(drive) for name, drive in result.drives.items()},
        "warnings": list(result.warnings),
        "failed": failed_document(result.failed),
    }


def show_imported(streams: Streams, found: FoundFleet, source: str, *, is_dry_run: bool) -> None:
    """Report the fleet file that was written from `source`; in a dry run print what it would hold."""
    for warning in found.warnings:
        streams.errors.print(f"warning: {warning}")
    if not is_dry_run:
        fleet = found.fleet
        streams.say(f"{format_count(fleet.nodes, 'machine')} found in {source}: {fleet.path} written")
    elif streams.is_json:
        streams.result(fleet_document(found.fleet))
    else:
        streams.write(found.text)


def fleet_document(fleet: Fleet) -> dict[str, object]:
    """Return the `csdctl.inventory/1` document: the nodes as the fleet file lists them."""
    return {
        "schema": INVENTORY_SCHEMA,
        "fleet": str(fleet.path),
        "network": fleet.network,
        "emulated": fleet.emulated,
        "nodes": [_node_document(node) for node in fleet.nodes],
    }


def _node_document(node: Node) -> dict[str, object]:
    values = {**asdict(node), "key": str(node.key) if node.key else None}
    return values | {"jump": _node_document(node.jump) if node.jump else None}


def _build_table(title: str, groups: Sequence[EqualMachines]) -> Table:
    table = _new_table(title)
    names = [_format_machines(group) for group in groups]
    longest = max(map(len, names), default=0)
    table.add_column(
        "machines", overflow="fold", min_width=max(len("machines"), min(longest, MAX_NAME_WIDTH))
    )
    table.add_column("CPU")
    for column in ("cores", "memory", "disk"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("Python", "Tensor\nFlow", "MPI"):
        table.add_column(column, no_wrap=True)
    for group, name in zip(groups, names, strict=True):
        facts = group.first
        table.add_row(
            name,
            facts.cpu_model or facts.architecture or _UNKNOWN,
            _format_cores(facts),
            _format_size(group.least("memory_limit_bytes") or group.least("memory_bytes")),
            _format_size(group.least("disk_free_bytes")),
            facts.python_version or _MISSING,
            facts.tensorflow_version or _MISSING,
            facts.mpi_version or _MISSING,
        )
    return table


def _format_size(size: float | None) -> str:
    """Format a size with three digits, which leaves room for names."""
    number, _, unit = format_bytes(size).partition(" ")
    return f"{float(number):.0f} {unit}" if unit and float(number) >= 100 else format_bytes(size)


def _format_machines(group: EqualMachines) -> str:
    number = len(group.names)
    return format_node_names(group.names) + (f" ({number})" if number > 1 else "")


def _fold_notes(machines: Mapping[str, Facts]) -> dict[str, list[str]]:
    """Return the machines that each note applies to."""
    names: dict[str, list[str]] = {}
    for facts in machines.values():
        for note in facts.notes:
            names.setdefault(note, []).append(facts.name)
    return names


def _build_details(machines: Mapping[str, Facts]) -> Table:
    table = _new_table("details")
    for column in ("machine", "architecture", "glibc", "mpi4py", "round trip", "clock"):
        table.add_column(column, no_wrap=True)
    table.add_column("Python prefix", overflow="fold")
    table.add_column("home", overflow="fold")
    for facts in machines.values():
        if not facts.problem:
            table.add_row(
                facts.name,
                facts.architecture or _UNKNOWN,
                facts.glibc_version or _UNKNOWN,
                facts.mpi4py_version or _MISSING,
                format_seconds(facts.round_trip_s),
                _UNKNOWN if facts.clock_offset_s is None else f"{facts.clock_offset_s:+.3f} s",
                facts.prefix or _UNKNOWN,
                facts.home or _UNKNOWN,
            )
    return table


def _new_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def _format_cores(facts: Facts) -> str:
    cores = _UNKNOWN if facts.num_cores is None else str(facts.num_cores)
    return f"{facts.cpu_limit:g} of {cores}" if facts.cpu_limit else cores
