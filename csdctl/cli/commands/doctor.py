"""`csdctl doctor`."""

from typing import Annotated

import typer

from csdctl.cli.options import (
    DEFAULT_FLEET,
    ExcludeOption,
    FailedFromOption,
    FleetOption,
    JsonOption,
    LimitOption,
)
from csdctl.cli.streams import Streams


def doctor(
    context: typer.Context,
    fleet: FleetOption = DEFAULT_FLEET,
    deadline: Annotated[
        float, typer.Option("--deadline", envvar="CSDCTL_DEADLINE", help="Seconds for the whole examination.")
    ] = 180.0,
    connect_deadline: Annotated[
        float,
        typer.Option(
            "--connect-deadline", envvar="CSDCTL_CONNECT_DEADLINE", help="Seconds to connect to a node."
        ),
    ] = 10.0,
    hello_deadline: Annotated[
        float,
        typer.Option(
            "--hello-deadline",
            envvar="CSDCTL_HELLO_DEADLINE",
            help="Seconds for all machines to enter MPI together, and again to sum.",
        ),
    ] = 60.0,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    failed_from: FailedFromOption = None,
    json: JsonOption = False,
) -> None:
    """Examine the machines, and let them say hello over MPI: what is wrong, and the remedy."""
    from csdctl.cli.render.doctor import ExaminationView, doctor_document
    from csdctl.cli.settings import list_settings
    from csdctl.workflows.preflight.doctor import DoctorOptions, examine
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    options = DoctorOptions(deadline, connect_deadline, hello_deadline)
    chosen = choose_fleet(fleet, limit, exclude, failed_from)
    settings = list_settings(context, chosen)
    with ExaminationView(streams.people, chosen, settings, is_verbose=streams.is_verbose) as view:
        examination = examine(chosen, streams.directory, options, view.show)
    view.finish(examination)
    streams.result(doctor_document(examination, settings))
    examination.check()
