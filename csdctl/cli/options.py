"""Options that several commands share, each defined once, and what the shell completes besides files.

Options of a panel are listed under its name, after the others.
"""

import glob
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from csdctl.errors import CsdctlError
from csdctl.runs.private import STATE_DIRECTORY

LATEST = "latest"
SELECTION = "Nodes and preflight"
DEFAULT_FLEET = Path("fleet.yaml")
DEFAULT_JOB = Path("job.yaml")


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


def option(text: str, *names: str, **settings: Any) -> Any:
    """Return an option with this line of help. Without `names`, it has the name of its parameter."""
    return typer.Option(*names, help=text, **settings)


group = partial(typer.Typer, add_completion=False, rich_markup_mode=None, no_args_is_help=True)
"""A command that has commands."""
selection = partial(option, rich_help_panel=SELECTION)
strategy = partial(option, rich_help_panel="Strategy")
resuming = partial(option, rich_help_panel="Losses, checkpoints and time limits")
background = partial(option, rich_help_panel="Background and monitoring")
"""Options of one panel each."""
Strategy = Literal["auto", "data-parallel", "features", "split"]
Precision = Literal["float32", "float16"]


FleetOption = Annotated[Path, option("Path of the fleet file.", envvar="CSDCTL_FLEET")]
JobArgument = Annotated[Path, typer.Argument(help="Path of the job file.")]
LimitOption = Annotated[
    list[str] | None,
    selection(
        "Only these nodes: names, ranges (csd[0-7]), groups, jump hosts (nodes behind them), or all.",
        metavar="NODES",
        autocompletion=complete_nodes,
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    selection(
        "Leave out these nodes; same syntax as --limit.", metavar="NODES", autocompletion=complete_nodes
    ),
]
FailedFromOption = Annotated[
    Path | None,
    selection(
        "Select only the nodes that an earlier command failed on: .csdctl/failed.json or --json output.",
        metavar="FILE",
    ),
]
JsonOption = Annotated[bool, option("Print JSON to stdout, and everything else to stderr.")]
ForceOption = Annotated[bool, option("Overwrite existing files.")]
DryRunOption = Annotated[bool, option("Show what would be done, without doing it.")]
YesOption = Annotated[bool, option("Do not ask for confirmation.", "--yes", "-y")]
PlanOption = Annotated[Path | None, option("Plan; default: the job's plan from `tune`.")]
BatchSizeOption = Annotated[int | None, option("Use this batch size on every rank instead of a plan.", min=1)]
MaxStepsOption = Annotated[int | None, option("Stop after this many steps, for benchmarks.", min=1)]
StrategyOption = Annotated[
    Strategy,
    strategy(
        "auto: as the plan says; features: compute frozen layers once per sample, then train the head; "
        "split: nodes compute the layers up to --cut, the host the rest."
    ),
]
CutOption = Annotated[str, strategy("split: last layer that nodes compute.", metavar="LAYER")]
MicroBatchesOption = Annotated[int, strategy("split: micro-batches of each rank's batch.", min=1)]
FeaturePrecisionOption = Annotated[Precision, strategy("features: type of stored features.")]
SkipDoctorOption = Annotated[bool, selection("Start without checking the machines first.")]
HtmlOption = Annotated[Path | None, option("Write charts and tables as self-contained HTML.", metavar="FILE")]
