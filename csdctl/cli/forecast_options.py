"""The options of `csdctl forecast`."""

from typing import Annotated

import typer

from csdctl.perfmodel.published import Network

PublishedOption = Annotated[
    Network | None,
    typer.Option(
        "--published",
        help="Forecast this network from the STANNIS paper, on Newport CSDs, instead of a job.",
        show_default=False,
    ),
]
NodesOption = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="NUMBERS",
        help="Numbers of nodes: 24, 1..36, or 4,8,16; default: 0 to all nodes.",
        show_default=False,
    ),
]
EpochsOption = Annotated[
    int | None,
    typer.Option("--epochs", min=1, help="Number of epochs; default: the job's.", show_default=False),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        help="Samples per epoch, public and private, for time and energy.",
        show_default=False,
    ),
]
MaxGlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        "--max-global-batch",
        min=1,
        help="Largest global batch size; default: the limit that the plan was tuned with.",
        show_default=False,
    ),
]
HostWattsOption = Annotated[
    float | None,
    typer.Option(
        "--host-watts",
        help="Power in watts that does not depend on the number of training nodes.",
        show_default=False,
    ),
]
NodeWattsOption = Annotated[
    float | None,
    typer.Option("--node-watts", help="Power in watts that each training node adds.", show_default=False),
]
AloneWattsOption = Annotated[
    float | None,
    typer.Option(
        "--alone-watts",
        help="Power in watts of the host alone, with ordinary drives; default: --host-watts.",
        show_default=False,
    ),
]
SumSecondsOption = Annotated[
    float | None,
    typer.Option(
        "--sum-seconds",
        min=0,
        help="Seconds that each node adds to the sum over the ranks.",
        show_default=False,
    ),
]
