"""Options of `csdctl train`, declared apart from the command."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.completion import complete_plans, complete_runs
from csdctl.worker.protocol.orders import COLLECTIVE_NAMES

_COLLECTIVES = ", ".join(COLLECTIVE_NAMES)

PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        help="Plan to use; default: the one `tune` wrote for the job.",
        autocompletion=complete_plans,
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Use this batch size on every rank instead of a plan."),
]
MaxStepsOption = Annotated[
    int | None, typer.Option("--max-steps", min=1, help="Stop after this many steps, for benchmarks.")
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Resume this run from its last completed step (`latest` works).",
        autocompletion=complete_runs,
    ),
]
MinNodesOption = Annotated[
    int, typer.Option("--min-nodes", help="Continue without lost nodes while at least this many are left.")
]
RebalanceOption = Annotated[
    bool, typer.Option("--rebalance/--no-rebalance", help="Adjust batch sizes when a node's speed changes.")
]
CollectiveOption = Annotated[
    str,
    typer.Option("--collective", metavar="NAME", help=f"How gradients are summed: {_COLLECTIVES} or auto."),
]
StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        metavar="STRATEGY",
        help="data-parallel; features: compute the model's frozen part once for each sample, then train its "
        "head; split: nodes compute the layers up to --cut, the host the rest; auto: as the plan says.",
    ),
]
CutOption = Annotated[
    str,
    typer.Option("--cut", metavar="LAYER", help="The last layer that nodes compute, for --strategy split."),
]
MicroBatchesOption = Annotated[
    int,
    typer.Option(
        "--micro-batches",
        min=1,
        help="Micro-batches of each rank's batch, for --strategy split: nodes compute some while the host "
        "computes others.",
    ),
]
FeaturePrecisionOption = Annotated[
    str, typer.Option("--feature-precision", metavar="TYPE", help="Store features in float32 or float16.")
]
FeatureEngineOption = Annotated[
    str,
    typer.Option(
        "--feature-engine",
        metavar="ENGINE",
        help="Compute features by keras, or by litert, which needs the package ai-edge-litert on all "
        "machines.",
    ),
]
CheckpointSecondsOption = Annotated[
    float,
    typer.Option(
        "--checkpoint-seconds", help="Write a checkpoint after each epoch, and at this interval in seconds."
    ),
]
KeepOption = Annotated[int, typer.Option("--keep", help="Number of checkpoints to keep, besides the best.")]
StartDeadlineOption = Annotated[
    float, typer.Option("--start-deadline", help="Seconds within which every rank must be ready.")
]
SilenceDeadlineOption = Annotated[
    float, typer.Option("--silence-deadline", help="Stop the run after this many seconds without a step.")
]
CallbackOption = Annotated[
    list[str] | None,
    typer.Option(
        "--callback",
        metavar="FILE.py:NAME",
        help="Call this function of yours with every event of the run, in a thread of its own.",
        show_default=False,
    ),
]
SkipDoctorOption = Annotated[
    bool, typer.Option("--skip-doctor", help="Start without checking the machines first.")
]
DetachOption = Annotated[
    bool,
    typer.Option(
        "--detach/--no-detach",
        help="Train in the background, without this terminal; `csdctl runs watch` shows the run.",
    ),
]
NotifyOption = Annotated[
    str | None,
    typer.Option(
        "--notify",
        metavar="COMMAND",
        help="Run this when the run has ended; CSDCTL_RUN, CSDCTL_STATE and CSDCTL_EXIT_CODE are set.",
        show_default=False,
    ),
]
