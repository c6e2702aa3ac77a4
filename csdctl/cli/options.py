"""Options that several commands share, each defined once, and what the shell completes besides files."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.errors import CsdctlError
from csdctl.runs.private import STATE_DIRECTORY


def complete_nodes(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of nodes in the fleet file of the command line; none where it cannot be read."""
    from csdctl.fleet.fleet_file import load_fleet

    try:
        nodes = load_fleet(Path(context.params.get("fleet") or "fleet.yaml")).nodes
    except (CsdctlError, OSError):
        return []
    return [node.name for node in nodes if node.name.startswith(incomplete)]


def complete_runs(incomplete: str) -> list[str]:
    """Return the ids of this project's runs, the latest first."""
    try:
        paths = sorted(Path(STATE_DIRECTORY, "runs").iterdir(), reverse=True)
    except OSError:
        return []
    return [path.name for path in paths if path.name.startswith(incomplete)]


DEFAULT_FLEET = Path("fleet.yaml")
DEFAULT_JOB = Path("job.yaml")

FleetOption = Annotated[Path, typer.Option(envvar="CSDCTL_FLEET", help="Path of the fleet file.")]
JobArgument = Annotated[Path, typer.Argument(help="Path of the job file.")]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Select only these nodes: names, ranges such as csd[0-7], or groups.",
        autocompletion=complete_nodes,
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option(help="Leave out these nodes; same syntax as --limit.", autocompletion=complete_nodes),
]
FailedFromOption = Annotated[
    Path | None,
    typer.Option(
        help="Select only the nodes that an earlier command failed on: .csdctl/failed.json or --json output."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON to stdout, and everything else to stderr.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, without doing it.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
PlanOption = Annotated[
    Path | None, typer.Option(help="Plan to use; default: the one `tune` wrote for the job.")
]
BatchSizeOption = Annotated[
    int | None, typer.Option(min=1, help="Use this batch size on every rank instead of a plan.")
]
MaxStepsOption = Annotated[
    int | None, typer.Option(min=1, help="Stop after this many steps, for benchmarks.")
]
StrategyOption = Annotated[
    str,
    typer.Option(
        metavar="STRATEGY",
        help="data-parallel; features: compute the model's frozen part once for each sample, then train its "
        "head; split: nodes compute the layers up to --cut, the host the rest; auto: as the plan says.",
    ),
]
CutOption = Annotated[
    str, typer.Option(metavar="LAYER", help="The last layer that nodes compute, for --strategy split.")
]
MicroBatchesOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Micro-batches of each rank's batch, for --strategy split: nodes compute some while the host "
        "computes others.",
    ),
]
FeaturePrecisionOption = Annotated[
    str, typer.Option(metavar="TYPE", help="Store features in float32 or float16.")
]
FeatureEngineOption = Annotated[
    str,
    typer.Option(
        metavar="ENGINE",
        help="Compute features by keras, or by litert, which needs the package ai-edge-litert on all "
        "machines.",
    ),
]
SkipDoctorOption = Annotated[
    bool, typer.Option("--skip-doctor", help="Start without checking the machines first.")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write charts and tables as one HTML file, which loads nothing."),
]
