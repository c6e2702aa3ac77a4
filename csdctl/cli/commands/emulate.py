"""`csdctl emulate up|status|down`: a fleet on this machine, without hardware."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.terminal.streams import Streams

STATE = Path(".csdctl", "emulated")
"""The files of the emulated fleet, below the project directory."""

app = typer.Typer(
    help="Run a fleet on this machine: real SSH servers that share its CPU and memory.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="Number of nodes, 1 to 64.")] = 4,
    cpu: Annotated[float, typer.Option(help="CPU share of each node, in cores.")] = 0.25,
    memory: Annotated[str, typer.Option(help="Memory of each node, such as 512M or 2G.")] = "2G",
    fleet: Annotated[Path, typer.Option(help="Path of the fleet file to write.")] = options.DEFAULT_FLEET,
    cpu_mechanism: Annotated[
        str,
        typer.Option(
            envvar="CSDCTL_EMULATED_CPU_MECHANISM",
            help="How the CPU share is enforced: auto, cgroup or duty.",
        ),
    ] = "auto",
    pid: Annotated[
        int | None,
        typer.Option(envvar="CSDCTL_EMULATE_PID", help="End the fleet when this process ends."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Start an emulated fleet, and write the fleet file that describes it."""
    from csdctl.emulation.fleet import fleet_status, is_up, start_fleet
    from csdctl.emulation.state import EmulatedSpec, parse_size
    from csdctl.terminal.fleet import EmulatedFleet, show_started

    streams = Streams(is_json=json)
    directory = streams.directory / STATE
    spec = EmulatedSpec(nodes, cpu, parse_size(memory))
    was_up = is_up(directory)
    path = start_fleet(directory, spec, fleet_path=fleet, cpu_mechanism=cpu_mechanism, owner_pid=pid)
    show_started(
        streams, EmulatedFleet(path, tuple(fleet_status(directory)), was_up, None if was_up else pid)
    )


@app.command()
def status(json: options.JsonOption = False) -> None:
    """Show the current state of every node of the emulated fleet."""
    from csdctl.emulation.fleet import fleet_status
    from csdctl.terminal.fleet import show_status

    streams = Streams(is_json=json)
    show_status(streams, fleet_status(streams.directory / STATE))


@app.command()
def down(json: options.JsonOption = False) -> None:
    """Stop the emulated fleet and remove its files, even after a crash."""
    from csdctl.emulation.fleet import stop_fleet
    from csdctl.terminal.fleet import show_stopped

    streams = Streams(is_json=json)
    show_stopped(streams, stop_fleet(streams.directory / STATE))
