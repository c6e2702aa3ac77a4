"""Options that several commands share, spelt once."""

from pathlib import Path
from typing import Annotated

import typer

FleetOption = Annotated[
    Path, typer.Option("--fleet", envvar="CSDCTL_FLEET", help="The fleet file.", show_default=True)
]
JobArgument = Annotated[Path, typer.Argument(help="The job file.", show_default=True)]
LimitOption = Annotated[
    list[str] | None,
    typer.Option("--limit", help="Only these nodes: names, csd[0-7], or groups.", show_default=False),
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", help="Not these nodes; like --limit.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, the rest on stderr.")]
FailedFromOption = Annotated[
    Path | None,
    typer.Option(
        "--failed-from",
        help="Only the nodes that a command failed on: .csdctl/failed.json, or its --json output.",
        show_default=False,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

DEFAULT_FLEET = Path("fleet.yaml")
DEFAULT_JOB = Path("job.yaml")
