"""`csdctl demo`: every command from an empty directory to a report, as a user would type them."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.options import DEFAULT_FLEET, DEFAULT_JOB
from csdctl.cli.streams import Streams


def demo(
    directory: Annotated[Path, typer.Option("--directory", help="Working directory of the demo.")] = Path(
        "demo"
    ),
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=64, help="Number of emulated nodes.")] = 3,
    cpu: Annotated[float, typer.Option("--cpu", help="CPU share of each node, in cores.")] = 0.25,
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer",
            help="Learn pictures on top of a pretrained base, and from scratch; downloads 150 MB.",
        ),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the emulated fleet running.")] = False,
) -> None:
    """Train on an emulated fleet, all commands: Fashion-MNIST, or transfer learning."""
    from csdctl.launch.mpirun import find_mpirun
    from csdctl.reporting.numbers import format_seconds
    from csdctl.workflows.data.demo import write_demo_files
    from csdctl.workflows.data.transfer_demo import fetch_transfer_demo
    from csdctl.workflows.maintenance.emulate import take_fleet_down

    streams = Streams()
    start = time.monotonic()
    find_mpirun()
    if transfer:
        fetch_transfer_demo(directory.absolute(), streams.say)
    else:
        write_demo_files(directory.absolute())
    os.chdir(directory)
    take_fleet_down(Path.cwd())
    streams.say(
        f"The demo runs in {Path.cwd()}. The fleet is emulated: its timings say nothing about real nodes."
    )
    list_steps = _list_transfer_steps if transfer else _list_steps
    steps = list_steps(nodes, cpu, None if keep else os.getpid())
    try:
        for command, run in steps.items():
            streams.say("")
            streams.console.print(f"$ csdctl {command}", style="bold", soft_wrap=True)
            run()
    finally:
        if not keep:
            take_fleet_down(Path.cwd())
    streams.say("")
    streams.say(f"The demo took {format_seconds(time.monotonic() - start)}.")
    if keep:
        streams.say(f"The fleet is still running: `cd {directory}`; to stop it: `csdctl emulate down`.")


def _list_steps(nodes: int, cpu: float, pid: int | None) -> dict[str, Callable[[], None]]:
    """Return the commands of the demo in order, each with its call; the fleet ends with process `pid`."""
    from csdctl.cli.commands import discover, emulate, prepare, report, train, tune

    return {
        f"emulate up --nodes {nodes} --cpu {cpu}": lambda: emulate.up(nodes=nodes, cpu=cpu, pid=pid),
        "discover": discover.discover,
        "prepare --sample fashion-mnist": lambda: prepare.prepare(
            DEFAULT_JOB, DEFAULT_FLEET, sample="fashion-mnist"
        ),
        "tune --no-explore": lambda: tune.tune(DEFAULT_JOB, DEFAULT_FLEET, explore=False),
        "train": lambda: train.train(DEFAULT_JOB, DEFAULT_FLEET),
        "report": report.report,
    }


def _list_transfer_steps(nodes: int, cpu: float, pid: int | None) -> dict[str, Callable[[], None]]:
    """Return the commands of the demo of transfer learning: every rank has the same batch size."""
    from csdctl.cli.commands import discover, emulate, prepare, report, train

    scratch = Path("scratch.yaml")
    return {
        f"emulate up --nodes {nodes} --cpu {cpu}": lambda: emulate.up(nodes=nodes, cpu=cpu, pid=pid),
        "discover": discover.discover,
        "prepare --sample openclipart": lambda: prepare.prepare(
            DEFAULT_JOB, DEFAULT_FLEET, sample="openclipart"
        ),
        "train --strategy features --batch-size 16": lambda: train.train(
            DEFAULT_JOB, DEFAULT_FLEET, strategy="features", batch_size=16
        ),
        "report": report.report,
        "train scratch.yaml --batch-size 16 --skip-doctor": lambda: train.train(
            scratch, DEFAULT_FLEET, batch_size=16, skip_doctor=True
        ),
    }
