"""What `discover` learnt: a table for people, a document for programs."""

from collections.abc import Mapping
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from csdctl.cli.render.numbers import show_bytes, show_seconds
from csdctl.errors import CsdctlError
from csdctl.fleet.facts import Facts
from csdctl.workflows.discover import DiscoverResult

SCHEMA = "csdctl.discover/1"
_UNKNOWN = "–"
_MISSING = "missing"


def render_fleet(console: Console, result: DiscoverResult, *, verbose: bool = False) -> None:
    """One row a machine; below, one line for each problem, its remedy, and what to look at."""
    title = f"fleet {result.fleet.path}" + (" (emulated fleet)" if result.fleet.emulated else "")
    console.print(_build_table(escape(title), result.facts))
    if verbose:
        console.print(_build_details(result.facts))
    for name, error in result.failed.items():
        _render_problem(console, name, error)
    for facts in result.facts.values():
        for note in facts.notes:
            console.print(f"note: {facts.name}: {note}", markup=False, soft_wrap=True)
    for warning in result.warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    console.print(f"facts: {result.path}", markup=False, soft_wrap=True)


def discover_document(result: DiscoverResult) -> dict[str, object]:
    """The `csdctl.discover/1` document."""
    return {
        "schema": SCHEMA,
        "fleet": str(result.fleet.path),
        "emulated": result.fleet.emulated,
        "machines": [
            {**asdict(facts), "remedy": result.failed[name].remedy if name in result.failed else None}
            for name, facts in result.facts.items()
        ],
        "warnings": list(result.warnings),
    }


def _build_table(title: str, machines: Mapping[str, Facts]) -> Table:
    table = _new_table(title)
    table.add_column("machine", no_wrap=True)
    table.add_column("CPU")
    for column in ("cores", "memory", "disk"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("Python", "TensorFlow", "MPI"):
        table.add_column(column)
    table.add_column("trip", justify="right", no_wrap=True)
    for facts in machines.values():
        if facts.problem:
            table.add_row(facts.name, "[red]see below[/red]")
            continue
        table.add_row(
            facts.name,
            escape(facts.cpu_model or facts.architecture or _UNKNOWN),
            _show_cores(facts),
            show_bytes(facts.memory_limit_bytes or facts.memory_bytes),
            show_bytes(facts.disk_free_bytes),
            facts.python_version or _MISSING,
            facts.tensorflow_version or _MISSING,
            facts.mpi_version or _MISSING,
            show_seconds(facts.round_trip_s),
        )
    return table


def _build_details(machines: Mapping[str, Facts]) -> Table:
    table = _new_table("details")
    for column in ("machine", "architecture", "glibc", "mpi4py", "clock"):
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
                _UNKNOWN if facts.clock_offset_s is None else f"{facts.clock_offset_s:+.3f} s",
                escape(facts.prefix or _UNKNOWN),
                escape(facts.home or _UNKNOWN),
            )
    return table


def _new_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def _show_cores(facts: Facts) -> str:
    cores = _UNKNOWN if facts.num_cores is None else str(facts.num_cores)
    return f"{facts.cpu_limit:g} of {cores}" if facts.cpu_limit else cores


def _render_problem(console: Console, name: str, error: CsdctlError) -> None:
    console.print("problem:", style="bold red", end=" ")
    console.print(f"{name}: {error.message}", markup=False, soft_wrap=True)
    if error.remedy:
        console.print(f"  → {error.remedy}", markup=False, soft_wrap=True)
