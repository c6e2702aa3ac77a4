"""Commands for a fleet without hardware: emulate, demo."""

import runpy
from pathlib import Path

import typer

import csdctl
from csdctl.cli import options
from csdctl.cli.call import open_streams
from csdctl.cli.options import option

emulate = options.group(help="Run a fleet on this machine: real SSH servers that share its CPU and memory.")
CPU = option(
    "0.25", "CPU share in cores, for all nodes, or for each: 0.5,0.25,0.1.", metavar="CORES[,CORES…]"
)


@emulate.command()
def up(
    nodes: int | None = option(
        None, "Number of nodes; default: as many as --cpu has values, or else 4.", min=1, max=64
    ),
    cpu: str = CPU,
    memory: str = option("2G", "Memory of each node, such as 512M or 2G."),
    fleet: Path = option(options.DEFAULT_FLEET, "Path of the fleet file to write."),
    pid: int | None = option(None, "End the fleet when this process ends.", envvar="CSDCTL_EMULATE_PID"),
    json: bool = options.JSON,
) -> None:
    """Start an emulated fleet and write its fleet file."""
    from csdctl.emulation import fleet as emulated
    from csdctl.terminal.fleet import show_started

    streams = open_streams(is_json=json)
    directory = streams.project.emulated
    spec = emulated.EmulatedSpec(emulated.parse_shares(cpu, nodes), emulated.parse_size(memory))
    was_up = emulated.is_up(directory)
    path = emulated.start_fleet(directory, spec, fleet_path=fleet, owner_pid=pid)
    status = emulated.fleet_status(directory)
    show_started(streams, path, status, was_up=was_up, owner_pid=None if was_up else pid)


@emulate.command()
def status(json: bool = options.JSON) -> None:
    """Show the current state of every node of the emulated fleet."""
    from csdctl.emulation.fleet import fleet_status
    from csdctl.terminal.fleet import show_status

    streams = open_streams(is_json=json)
    show_status(streams, fleet_status(streams.project.emulated))


@emulate.command()
def down(
    keep: bool = option(False, "Keep the nodes' files: the same `emulate up` starts them again."),
    json: bool = options.JSON,
) -> None:
    """Stop the emulated fleet and remove its files, even after a crash."""
    from csdctl.emulation.fleet import stop_fleet
    from csdctl.terminal.fleet import show_stopped

    streams = open_streams(is_json=json)
    show_stopped(streams, stop_fleet(streams.project.emulated, keep=keep))


def demo(
    directory: Path = option(Path("demo"), "Working directory of the demo."),
    nodes: int = option(3, "Number of emulated nodes.", min=1, max=64),
    cpu: str = CPU,
    transfer: bool = option(False, "Train on a pretrained base, and from scratch; downloads 150 MB."),
    keep: bool = option(False, "Leave the emulated fleet running."),
) -> None:
    """Run all commands on an emulated fleet: Fashion-MNIST, or transfer learning."""
    package = Path(csdctl.__file__).parent  # the wheel has the examples in it, the repository beside it
    [script, *_] = [*package.glob("examples/demo.py"), *package.parent.glob("examples/demo.py")]
    run_demo = runpy.run_path(str(script))["run_demo"]
    if code := run_demo(directory, nodes, cpu, is_transfer=transfer, is_keeping=keep):
        raise typer.Exit(code)
