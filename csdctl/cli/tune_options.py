"""The options of `csdctl tune`."""

from typing import Annotated

import typer

from csdctl.tuning.stannis import DEFAULT_BATCH_SIZES

STANNIS_PANEL = "Algorithm 1 (--method stannis)"
DEFAULT_BATCH_SIZE_LIST = ",".join(map(str, DEFAULT_BATCH_SIZES))

MethodOption = Annotated[
    str, typer.Option("--method", help="fit: a model fitted to few probes; stannis: the paper's Algorithm 1.")
]
MaxGlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        "--max-global-batch",
        min=1,
        help="fit: the largest global batch size; default: 4 × recipe.reference_batch, and at most a tenth "
        "of an epoch's samples.",
        show_default=False,
    ),
]
GlobalBatchOption = Annotated[
    int | None, typer.Option("--global-batch", min=1, help="fit: the exact global batch size.")
]
MaxStepOption = Annotated[
    float | None, typer.Option("--max-step-seconds", help="fit: the longest step time in seconds.")
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="fit: ignore earlier measurements.")]
ExploreOption = Annotated[
    bool,
    typer.Option(
        "--explore/--no-explore", help="fit: also probe threads and oneDNN, and use the faster settings."
    ),
]
StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        metavar="STRATEGY",
        help="fit: compare the strategies (auto), or plan for one: data-parallel, features or split.",
    ),
]
CutOption = Annotated[
    str,
    typer.Option("--cut", metavar="LAYER", help="fit: the last layer of the nodes, for --strategy split."),
]
HostOption = Annotated[
    bool,
    typer.Option(
        "--host/--no-host",
        help="Whether the host trains, or only sums gradients; by default it trains, unless the fleet is 5% "
        "faster without it.",
    ),
]
ProbeSecondsOption = Annotated[float, typer.Option("--probe-seconds", help="Minimum duration of a probe.")]
BatchSizesOption = Annotated[
    str,
    typer.Option("--batch-sizes", help="stannis: the batch sizes to probe.", rich_help_panel=STANNIS_PANEL),
]
StepDivisorOption = Annotated[
    float,
    typer.Option(
        "-C",
        "--step-divisor",
        help="stannis: C; a larger value takes smaller steps.",
        rich_help_panel=STANNIS_PANEL,
    ),
]
MarginScaleOption = Annotated[
    float,
    typer.Option(
        "-E",
        "--margin-scale",
        help="stannis: E; 20 leaves a margin of 5%, the paper's value 5 leaves 20%.",
        rich_help_panel=STANNIS_PANEL,
    ),
]
