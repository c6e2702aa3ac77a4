"""`csdctl emulate up|status|down`: a fleet on this machine, without hardware."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from csdctl.workflows import emulate

if TYPE_CHECKING:
    from csdctl.emulation.fleet import NodeStatus

SCHEMA = 1

app = typer.Typer(
    help="A fleet on this machine: real SSH servers that share its CPU and memory.", no_args_is_help=True
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="How many nodes, 1 to 64.")] = 4,
    cpu: Annotated[float, typer.Option(help="Share of the CPU for each node, in cores.")] = 0.25,
    memory: Annotated[str, typer.Option(help="Memory for each node, such as 512M or 2G.")] = "2G",
    fleet: Annotated[Path, typer.Option(help="The fleet file to write.")] = Path("fleet.yaml"),
    cpu_mechanism: Annotated[
        str,
        typer.Option(
            envvar="CSDCTL_EMULATED_CPU_MECHANISM", help="How the share is held: auto, cgroup or duty."
        ),
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Start an emulated fleet and write the fleet.yaml that describes it."""
    result = emulate.bring_fleet_up(
        Path.cwd(), num_nodes=nodes, cpu=cpu, memory=memory, fleet_path=fleet, cpu_mechanism=cpu_mechanism
    )
    if as_json:
        _show_json({"fleet": str(result.fleet_path), "was_up": result.was_up, "nodes": _rows(result.nodes)})
        return
    _show_nodes(result.nodes)
    typer.echo(f"Emulated fleet {'was up already' if result.was_up else 'is up'}: {result.fleet_path}")


@app.command()
def status(as_json: JsonOption = False) -> None:
    """Show every node of the emulated fleet as it is now."""
    nodes = emulate.look_at_fleet(Path.cwd())
    if as_json:
        _show_json({"nodes": _rows(nodes)})
    else:
        _show_nodes(nodes)


@app.command()
def down(as_json: JsonOption = False) -> None:
    """End the emulated fleet and remove everything of it, also after a crash."""
    stopped = emulate.take_fleet_down(Path.cwd())
    if as_json:
        kept = stopped.kept_fleet_path and str(stopped.kept_fleet_path)
        _show_json({"num_processes": stopped.num_processes, "kept_fleet": kept})
        return
    typer.echo(f"Emulated fleet is down: {stopped.num_processes} processes ended")
    if stopped.kept_fleet_path:
        typer.echo(f"{stopped.kept_fleet_path} was changed by hand and is left as it is", err=True)


def _rows(nodes: Iterable["NodeStatus"]) -> list[dict[str, object]]:
    return [asdict(node) for node in nodes]


def _show_json(content: dict[str, object]) -> None:
    typer.echo(json.dumps({"schema": SCHEMA, "emulated": True, **content}, indent=2))


def _show_nodes(nodes: Iterable["NodeStatus"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("node", "port", "state", "processes", "CPU limit", "memory", title="emulated")
    for node in nodes:
        memory = f"{node.memory_bytes >> 20} of {node.memory_limit_bytes >> 20} MiB"
        state = "running" if node.is_running else "ended"
        limit = f"{node.cpu_limit:g} cores ({node.cpu_mechanism})"
        table.add_row(node.name, str(node.port), state, str(node.num_processes), limit, memory)
    Console().print(table)
