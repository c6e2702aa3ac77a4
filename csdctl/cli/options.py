"""Options that several commands share, each defined once."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.completion import complete_jobs, complete_nodes

DEFAULT_FLEET = Path("fleet.yaml")
DEFAULT_JOB = Path("job.yaml")

FleetOption = Annotated[
    Path, typer.Option("--fleet", envvar="CSDCTL_FLEET", help="Path of the fleet file.", show_default=True)
]
JobArgument = Annotated[
    Path, typer.Argument(help="Path of the job file.", show_default=True, autocompletion=complete_jobs)
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        help="Select only these nodes: names, ranges such as csd[0-7], or groups.",
        show_default=False,
        autocompletion=complete_nodes,
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        help="Leave out these nodes; same syntax as --limit.",
        show_default=False,
        autocompletion=complete_nodes,
    ),
]
FailedFromOption = Annotated[
    Path | None,
    typer.Option(
        "--failed-from",
        help="Select only the nodes that an earlier command failed on: .csdctl/failed.json or --json output.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON to stdout, and everything else to stderr.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, without doing it.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
