"""How commands declare options and arguments, and what the shell completes besides files.

Options of a panel are listed under its name, after the others.
"""

import glob
import re
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from csdctl.errors import CsdctlError, InputError
from csdctl.runs.private import STATE_DIRECTORY

SELECTION = "Nodes and preflight"
DEFAULT_FLEET = Path("fleet.yaml")
DEFAULT_JOB = Path("job.yaml")
LATEST = "latest"
SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
AGES = {"h": 3600.0, "d": 86400.0, "w": 604800.0}
"""Bytes and seconds, by the unit that is written after the number."""


def complete_nodes(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of nodes in the fleet file of the command line. None where it cannot be read."""
    from csdctl.fleet.fleet_file import load_fleet

    try:
        nodes = load_fleet(Path(context.params.get("fleet") or "fleet.yaml")).nodes
    except (CsdctlError, OSError):
        return []
    return [node.name for node in nodes if node.name.startswith(incomplete)]


def complete_runs(incomplete: str) -> list[str]:
    """Return `latest` and the ids of this project's runs, the latest first."""
    names = sorted(_names(STATE_DIRECTORY, "runs", "*"), reverse=True)
    return [name for name in (*([LATEST] if names else []), *names) if name.startswith(incomplete)]


def complete_models(incomplete: str) -> list[str]:
    """Return the runs of this project, and the .keras files of this directory."""
    return [*complete_runs(incomplete), *_names(".", f"{glob.escape(incomplete)}*.keras")]


def _names(*pattern: str) -> list[str]:
    return [Path(path).name for path in sorted(glob.glob(str(Path(*pattern))))]


def parse_size(text: str) -> int:
    """Parse `2G`, `512M` or `1.5GiB` as bytes (K, M, G and T are powers of 1024). Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise InputError(f"received {text!r} as a size, expected a number and a unit", remedy="such as 2G")
    return int(float(match[1]) * SIZES[match[2].upper()])


def parse_age(text: str) -> float:
    """Parse `12h`, `90d` or `4w` as seconds. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([hdw])", text.strip())
    if not match:
        raise InputError(f"received {text!r} as an age, expected a number and a unit", remedy="such as 90d")
    return float(match[1]) * AGES[match[2]]


def option(default: Any, text: str, *names: str, **settings: Any) -> Any:
    """Return an option with this line of help. Without `names`, it has the name of its parameter."""
    return typer.Option(default, *names, help=text, **settings)


def argument(default: Any, text: str, **settings: Any) -> Any:
    """Return an argument with this line of help. It is required if its default is `...`."""
    return typer.Argument(default, help=text, **settings)


group = partial(typer.Typer, add_completion=False, rich_markup_mode=None, no_args_is_help=True)
"""A command that has commands."""
selection = partial(option, rich_help_panel=SELECTION)
strategy = partial(option, rich_help_panel="Strategy")
resuming = partial(option, rich_help_panel="Losses, checkpoints and time limits")
background = partial(option, rich_help_panel="Background and monitoring")
"""Options of one panel each."""
nodes = partial(selection, None, metavar="NODES", autocompletion=complete_nodes)
Strategy = Literal["auto", "data-parallel", "features", "split"]
Precision = Literal["float32", "float16"]
