"""`csdctl emulate up|status|down`: a fleet on this machine, without hardware."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.options import DEFAULT_FLEET, JsonOption
from csdctl.cli.streams import Streams

app = typer.Typer(
    help="A fleet on this machine: real SSH servers that share its CPU and memory.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="How many nodes, 1 to 64.")] = 4,
    cpu: Annotated[float, typer.Option(help="Share of the CPU for each node, in cores.")] = 0.25,
    memory: Annotated[str, typer.Option(help="Memory for each node, such as 512M or 2G.")] = "2G",
    fleet: Annotated[Path, typer.Option(help="The fleet file to write.")] = DEFAULT_FLEET,
    cpu_mechanism: Annotated[
        str,
        typer.Option(
            envvar="CSDCTL_EMULATED_CPU_MECHANISM", help="How the share is held: auto, cgroup or duty."
        ),
    ] = "auto",
    json: JsonOption = False,
) -> None:
    """Start an emulated fleet and write the fleet.yaml that describes it."""
    from csdctl.cli.render.emulate import emulate_document, render_nodes
    from csdctl.workflows.maintenance.emulate import bring_fleet_up

    streams = Streams(is_json=json)
    result = bring_fleet_up(
        streams.directory,
        num_nodes=nodes,
        cpu=cpu,
        memory=memory,
        fleet_path=fleet,
        cpu_mechanism=cpu_mechanism,
    )
    if json:
        streams.result(emulate_document(result.nodes, fleet=str(result.fleet_path), was_up=result.was_up))
        return
    render_nodes(streams.people, result.nodes)
    streams.say(f"Emulated fleet {'was up already' if result.was_up else 'is up'}: {result.fleet_path}")


@app.command()
def status(json: JsonOption = False) -> None:
    """Show every node of the emulated fleet as it is now."""
    from csdctl.cli.render.emulate import emulate_document, render_nodes
    from csdctl.workflows.maintenance.emulate import read_fleet_status

    streams = Streams(is_json=json)
    nodes = read_fleet_status(streams.directory)
    if json:
        streams.result(emulate_document(nodes))
    else:
        render_nodes(streams.people, nodes)


@app.command()
def down(json: JsonOption = False) -> None:
    """End the emulated fleet and remove everything of it, also after a crash."""
    from csdctl.cli.render.emulate import emulate_document
    from csdctl.workflows.maintenance.emulate import take_fleet_down

    streams = Streams(is_json=json)
    stopped = take_fleet_down(streams.directory)
    kept = stopped.kept_fleet_path
    if json:
        streams.result(
            emulate_document(num_processes=stopped.num_processes, kept_fleet=str(kept) if kept else None)
        )
        return
    streams.say(f"Emulated fleet is down: {stopped.num_processes} processes ended")
    if kept:
        streams.say(f"{kept} was changed by hand and is left as it is")
