"""Options of `csdctl train`, declared apart from the command."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.worker.protocol.orders import COLLECTIVE_NAMES

_COLLECTIVES = ", ".join(COLLECTIVE_NAMES)

PlanOption = Annotated[
    Path | None,
    typer.Option("--plan", help="The plan to follow; default: the one `tune` wrote for the job."),
]
BatchSizeOption = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="No plan: this batch size on every rank.")
]
MaxStepsOption = Annotated[
    int | None, typer.Option("--max-steps", min=1, help="End after this many steps, for measuring.")
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="RUN", help="Resume this run from its last completed step (`latest` works)."
    ),
]
MinNodesOption = Annotated[
    int, typer.Option("--min-nodes", help="Continue without lost nodes while at least this many are left.")
]
RebalanceOption = Annotated[
    bool, typer.Option("--rebalance/--no-rebalance", help="Move batch sizes when a node's speed changes.")
]
CollectiveOption = Annotated[
    str,
    typer.Option("--collective", metavar="NAME", help=f"How gradients are summed: {_COLLECTIVES} or auto."),
]
CheckpointSecondsOption = Annotated[
    float,
    typer.Option(
        "--checkpoint-seconds", help="Write a checkpoint after each epoch, and at this interval in seconds."
    ),
]
KeepOption = Annotated[int, typer.Option("--keep", help="Checkpoints to keep, besides the best one.")]
StartDeadlineOption = Annotated[
    float, typer.Option("--start-deadline", help="Seconds until every rank must be ready.")
]
SilenceDeadlineOption = Annotated[
    float, typer.Option("--silence-deadline", help="Seconds without a step after which a run is ended.")
]
SkipDoctorOption = Annotated[
    bool, typer.Option("--skip-doctor", help="Start without examining the machines first.")
]
