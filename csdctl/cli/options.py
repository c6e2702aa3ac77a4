"""Options that several commands share, each defined once.

Options of a panel are listed under its name, after the others.
"""

from functools import partial
from pathlib import Path
from typing import Literal

import typer

from csdctl.cli.parameters import argument, complete_nodes, option

SELECTION = "Nodes and preflight"
DEFAULT_FLEET = Path("fleet.yaml")
DEFAULT_JOB = Path("job.yaml")
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

FLEET = option(DEFAULT_FLEET, "Path of the fleet file.", envvar="CSDCTL_FLEET")
JOB = argument(DEFAULT_JOB, "Path of the job file.")
LIMIT = nodes("Only these nodes: names, ranges (csd[0-7]), groups, jump hosts (nodes behind them), or all.")
EXCLUDE = nodes("Leave out these nodes; same syntax as --limit.")
FAILED_FROM = selection(
    None,
    "Select only the nodes that an earlier command failed on: .csdctl/failed.json or --json output.",
    metavar="FILE",
)
JSON = option(False, "Print JSON to stdout, and everything else to stderr.")
FORCE = option(False, "Overwrite existing files.")
DRY_RUN = option(False, "Show what would be done, without doing it.")
YES = option(False, "Do not ask for confirmation.", "--yes", "-y")
PLAN = option(None, "Plan; default: the job's plan from `tune`.")
BATCH_SIZE = option(None, "Use this batch size on every rank instead of a plan.", min=1)
MAX_STEPS = option(None, "Stop after this many steps, for benchmarks.", min=1)
STRATEGY = strategy(
    "auto",
    "auto: as the plan says; features: compute frozen layers once per sample, then train the head; "
    "split: nodes compute the layers up to --cut, the host the rest.",
)
CUT = strategy("", "split: last layer that nodes compute.", metavar="LAYER")
MICRO_BATCHES = strategy(4, "split: micro-batches of each rank's batch.", min=1)
FEATURE_PRECISION = strategy("float32", "features: type of stored features.")
SKIP_DOCTOR = selection(False, "Start without checking the machines first.")
HTML = option(None, "Write charts and tables as self-contained HTML.", metavar="FILE")
