"""`csdctl demo`: every command from an empty directory to a report, as a user would type them."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from csdctl.errors import InputError, RunError
from csdctl.terminal.streams import Streams

EXAMPLES = Path(__file__).parents[3] / "examples"
"""Of the repository; not part of an installed csdctl."""
STEPS = (
    "csdctl discover",
    "python examples/sample_data.py fashion-mnist",
    "csdctl prepare",
    "csdctl tune --no-explore",
    "csdctl train",
    "csdctl report",
)
TRANSFER_STEPS = (
    "python efficientnet_lite0.py",
    "csdctl discover",
    "python examples/sample_data.py openclipart",
    "csdctl prepare",
    "csdctl train --strategy features --batch-size 16",
    "csdctl report",
    "csdctl train scratch.yaml --batch-size 16 --skip-doctor",
)
"""Every rank has the same batch size."""


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
        typer.Option("--examples", help="The directory examples/ of csdctl's repository."),
    ] = None,
) -> None:
    """Train on an emulated fleet, all commands: Fashion-MNIST, or transfer learning."""
    from csdctl.cli.app import run_command
    from csdctl.cli.commands.emulate import STATE
    from csdctl.emulation.fleet import stop_fleet
    from csdctl.launch.mpi_command import find_mpirun
    from csdctl.reporting.numbers import format_seconds

    streams = Streams()
    start = time.monotonic()
    find_mpirun()
    examples = (examples or EXAMPLES).absolute()
    _copy_example(examples / ("transfer_learning" if transfer else "fashion_mnist"), directory)
    os.chdir(directory)
    emulated = Path.cwd() / STATE
    stop_fleet(emulated)
    streams.say(
        f"The demo runs in {Path.cwd()}. The fleet is emulated: its timings say nothing about real nodes."
    )
    up = f"csdctl emulate up --nodes {nodes} --cpu {cpu}"
    try:
        for step in [up, *(TRANSFER_STEPS if transfer else STEPS)]:
            streams.say("")
            streams.console.print(f"$ {step}", style="bold", soft_wrap=True)
            words = shlex.split(step)
            if words[0] == "python":
                _run_python(words[1].replace("examples", str(examples), 1), *words[2:])
                continue
            words += ["--pid", str(os.getpid())] if step == up and not keep else []
            if code := run_command(words[1:], Streams()):
                raise typer.Exit(code)
    finally:
        if not keep:
            stop_fleet(emulated)
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


def _run_python(*words: str) -> None:
    if subprocess.run([sys.executable, *words], check=False).returncode != 0:
        raise RunError(f"{Path(words[0]).name} failed; its message is above")
