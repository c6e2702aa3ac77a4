"""`csdctl doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli import options


def doctor(
    context: typer.Context,
    fleet: options.FleetOption = options.DEFAULT_FLEET,
    deadline: Annotated[
        float, typer.Option("--deadline", envvar="CSDCTL_DEADLINE", help="Seconds for all checks together.")
    ] = 180.0,
    connect_deadline: Annotated[
        float,
        typer.Option(
            "--connect-deadline", envvar="CSDCTL_CONNECT_DEADLINE", help="Seconds to connect to a node."
        ),
    ] = 10.0,
    mpi_deadline: Annotated[
        float,
        typer.Option(
            "--mpi-deadline",
            envvar="CSDCTL_MPI_DEADLINE",
            help="Seconds for all machines to start MPI together, and again for their allreduce.",
        ),
    ] = 60.0,
    limit: options.LimitOption = None,
    exclude: options.ExcludeOption = None,
    failed_from: options.FailedFromOption = None,
    job: Annotated[
        Path | None,
        typer.Option(
            "--job",
            help="Also look for what the own code of this job imports; by default of job.yaml, "
            "if there is one.",
            show_default=False,
        ),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Check that the machines can train together, and report how to fix what fails."""
    from csdctl.cli.invocation import Invocation
    from csdctl.cli.render.doctor import ExaminationView, doctor_document, list_settings
    from csdctl.workflows.data.imports import read_imports
    from csdctl.workflows.preflight.doctor import DoctorOptions, examine

    deadlines = DoctorOptions(deadline, connect_deadline, mpi_deadline)
    call = Invocation.start("doctor", fleet, limit, exclude, failed_from, json=json)
    streams = call.streams
    settings = list_settings(context, call.fleet)
    imports = read_imports(job, streams.directory)
    with ExaminationView(streams.console, call.fleet, settings, is_verbose=streams.is_verbose) as view:
        examination = examine(call.fleet, streams.directory, deadlines, view.show, imports)
    view.finish(examination)
    streams.result(doctor_document(examination, settings))
    examination.check()
