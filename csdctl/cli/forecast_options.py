"""The options of `csdctl forecast`."""

from typing import Annotated

import typer

from csdctl.perfmodel.published import Network

PublishedOption = Annotated[
    Network | None,
    typer.Option(
        "--published",
        help="Instead of a job: this network with the figures of the STANNIS paper, on Newport CSDs.",
        show_default=False,
    ),
]
NodesOption = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="NUMBERS",
        help="Numbers of nodes: 24, 1..36, or 4,8,16; default: 0 to all of them.",
        show_default=False,
    ),
]
EpochsOption = Annotated[
    int | None, typer.Option("--epochs", min=1, help="Instead of the job's.", show_default=False)
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        help="Samples of an epoch, public and private: for the time to finish.",
        show_default=False,
    ),
]
MaxGlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        "--max-global-batch",
        min=1,
        help="Instead of the limit that the plan was tuned with.",
        show_default=False,
    ),
]
HostWattsOption = Annotated[
    float | None,
    typer.Option(
        "--host-watts",
        help="Power that does not depend on the number of nodes that train.",
        show_default=False,
    ),
]
NodeWattsOption = Annotated[
    float | None,
    typer.Option("--node-watts", help="Power that each node that trains adds.", show_default=False),
]
AloneWattsOption = Annotated[
    float | None,
    typer.Option(
        "--alone-watts",
        help="Power of the host alone, with ordinary drives; default: --host-watts.",
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
