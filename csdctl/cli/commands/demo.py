"""`csdctl demo`: the main job from an empty directory to a report, as a person would type it."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.options import DEFAULT_FLEET, DEFAULT_JOB
from csdctl.cli.streams import Streams


def demo(
    directory: Annotated[Path, typer.Option("--directory", help="Where the demo works.")] = Path("demo"),
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=64, help="Emulated nodes.")] = 3,
    cpu: Annotated[float, typer.Option("--cpu", help="Each node's share of a core.")] = 0.25,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the emulated fleet running.")] = False,
) -> None:
    """Train Fashion-MNIST on an emulated fleet, from `emulate up` to `report`."""
    from csdctl.cli.commands import discover, emulate, prepare, report, train, tune
    from csdctl.cli.render.numbers import format_seconds
    from csdctl.launch.tools import check_tools
    from csdctl.workflows.data.demo import write_demo_files
    from csdctl.workflows.maintenance.emulate import take_fleet_down

    streams = Streams()
    began = time.monotonic()
    check_tools()
    write_demo_files(directory.absolute())
    os.chdir(directory)
    take_fleet_down(Path.cwd())

    def step(command: str) -> None:
        streams.people.print(f"\n[bold]$ csdctl {command}[/bold]", soft_wrap=True)

    streams.say(f"The demo works in {Path.cwd()}. The fleet is emulated: it shows function, never speed.")
    try:
        step(f"emulate up --nodes {nodes} --cpu {cpu}")
        emulate.up(nodes=nodes, cpu=cpu, memory="2G", fleet=DEFAULT_FLEET, cpu_mechanism="auto", json=False)
        step("discover")
        discover.discover()
        step("prepare --sample fashion-mnist")
        prepare.prepare(DEFAULT_JOB, DEFAULT_FLEET, sample="fashion-mnist")
        step("tune --no-explore")
        tune.tune(DEFAULT_JOB, DEFAULT_FLEET, explore=False)
        step("train")
        train.train(DEFAULT_JOB, DEFAULT_FLEET)
        step("report")
        report.report()
    finally:
        if not keep:
            take_fleet_down(Path.cwd())
    streams.say(f"\nThe demo took {format_seconds(time.monotonic() - began)}.")
    if keep:
        streams.say(f"The fleet still runs: `cd {directory}`, try commands, then `csdctl emulate down`.")
