"""`csdctl demo`: every command from an empty directory to a report, as a user would type them."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.options import DEFAULT_FLEET, DEFAULT_JOB
from csdctl.errors import InputError, RunError
from csdctl.terminal.streams import Streams

EXAMPLES = Path(__file__).parents[3] / "examples"
"""Of the repository; not part of an installed csdctl."""


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
    examples: Annotated[
        Path | None,
        typer.Option(
            "--examples", help="The directory examples/ of csdctl's repository.", show_default=False
        ),
    ] = None,
) -> None:
    """Train on an emulated fleet, all commands: Fashion-MNIST, or transfer learning."""
    from csdctl.launch.mpi_command import find_mpirun
    from csdctl.reporting.numbers import format_seconds
    from csdctl.workflows.maintenance.emulate import take_fleet_down

    streams = Streams()
    start = time.monotonic()
    find_mpirun()
    examples = (examples or EXAMPLES).absolute()
    _copy_example(examples / ("transfer_learning" if transfer else "fashion_mnist"), directory)
    os.chdir(directory)
    take_fleet_down(Path.cwd())
    streams.say(
        f"The demo runs in {Path.cwd()}. The fleet is emulated: its timings say nothing about real nodes."
    )
    list_steps = _list_transfer_steps if transfer else _list_steps
    steps = list_steps(examples / "sample_data.py", nodes, cpu, None if keep else os.getpid())
    try:
        for command, run in steps.items():
            streams.say("")
            streams.console.print(f"$ {command}", style="bold", soft_wrap=True)
            run()
    finally:
        if not keep:
            take_fleet_down(Path.cwd())
    streams.say("")
    streams.say(f"The demo took {format_seconds(time.monotonic() - start)}.")
    if keep:
        streams.say(f"The fleet is still running: `cd {directory}`; to stop it: `csdctl emulate down`.")


def _copy_example(example: Path, directory: Path) -> None:
    """Copy the files of an example; existing files are kept. Raises InputError without the example."""
    if not (example / "job.yaml").is_file():
        raise InputError(
            f"{example} does not exist: an installed csdctl has no examples",
            remedy="run `make demo` in csdctl's repository, or name its examples/ with --examples",
        )
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is not a directory", remedy="give another directory with --directory")
    directory.mkdir(parents=True, exist_ok=True)
    for file in example.glob("*.*"):
        if not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)


def _run_python(*words: str | Path) -> Callable[[], None]:
    def run() -> None:
        if subprocess.run([sys.executable, *words], check=False).returncode != 0:
            raise RunError(f"{Path(words[0]).name} failed; its message is above")

    return run


def _list_steps(sample_data: Path, nodes: int, cpu: float, pid: int | None) -> dict[str, Callable[[], None]]:
    """Return the commands of the demo in order, each with its call; the fleet ends with process `pid`."""
    from csdctl.cli.commands import discover, emulate, prepare, report, train, tune

    return {
        f"csdctl emulate up --nodes {nodes} --cpu {cpu}": lambda: emulate.up(nodes=nodes, cpu=cpu, pid=pid),
        "csdctl discover": discover.discover,
        "python examples/sample_data.py fashion-mnist": _run_python(sample_data, "fashion-mnist"),
        "csdctl prepare": prepare.prepare,
        "csdctl tune --no-explore": lambda: tune.tune(DEFAULT_JOB, DEFAULT_FLEET, explore=False),
        "csdctl train": lambda: train.train(DEFAULT_JOB, DEFAULT_FLEET),
        "csdctl report": report.report,
    }


def _list_transfer_steps(
    sample_data: Path, nodes: int, cpu: float, pid: int | None
) -> dict[str, Callable[[], None]]:
    """Return the commands of the demo of transfer learning: every rank has the same batch size."""
    from csdctl.cli.commands import discover, emulate, prepare, report, train

    scratch = Path("scratch.yaml")
    return {
        "python efficientnet_lite0.py": _run_python("efficientnet_lite0.py"),
        f"csdctl emulate up --nodes {nodes} --cpu {cpu}": lambda: emulate.up(nodes=nodes, cpu=cpu, pid=pid),
        "csdctl discover": discover.discover,
        "python examples/sample_data.py openclipart": _run_python(sample_data, "openclipart"),
        "csdctl prepare": prepare.prepare,
        "csdctl train --strategy features --batch-size 16": lambda: train.train(
            DEFAULT_JOB, DEFAULT_FLEET, strategy="features", batch_size=16
        ),
        "csdctl report": report.report,
        "csdctl train scratch.yaml --batch-size 16 --skip-doctor": lambda: train.train(
            scratch, DEFAULT_FLEET, batch_size=16, skip_doctor=True
        ),
    }
