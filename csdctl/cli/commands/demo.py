"""`csdctl demo`: every command from an empty directory to a report; examples/demo.py of the repository."""

import runpy
from pathlib import Path
from typing import Annotated

import typer

from csdctl.errors import InputError

SCRIPT = Path(__file__).parents[3] / "examples" / "demo.py"
"""Not part of an installed csdctl."""


def demo(
    directory: Annotated[Path, typer.Option(help="Working directory of the demo.")] = Path("demo"),
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Number of emulated nodes.")] = 3,
    cpu: Annotated[float, typer.Option(help="CPU share of each node, in cores.")] = 0.25,
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
    if not SCRIPT.is_file():
        raise InputError(
            "an installed csdctl has no examples: the demo is in csdctl's repository",
            remedy="run `make demo` there",
        )
    run_demo = runpy.run_path(str(SCRIPT))["run_demo"]
    if code := run_demo(directory, nodes, cpu, is_transfer=transfer, is_keeping=keep):
        raise typer.Exit(code)
