"""`csdctl doctor`."""

from typing import TYPE_CHECKING, Annotated

import typer

from csdctl.cli.call import Call, on_fleet

if TYPE_CHECKING:
    from csdctl.fleet.model import Fleet
    from csdctl.terminal.doctor import Setting

_SETTINGS = ("fleet", "deadline", "connect_deadline", "mpi_deadline", "limit", "exclude")
_SOURCES = {
    "COMMANDLINE": "flag",
    "ENVIRONMENT": "environment",
    "DEFAULT": "default",
    "DEFAULT_MAP": "file config.yaml",
}


@on_fleet
def doctor(
    call: Call,
    context: typer.Context,
    deadline: Annotated[
        float, typer.Option(envvar="CSDCTL_DEADLINE", help="Seconds for all checks together.")
    ] = 180.0,
    connect_deadline: Annotated[
        float, typer.Option(envvar="CSDCTL_CONNECT_DEADLINE", help="Seconds to connect to a node.")
    ] = 10.0,
    mpi_deadline: Annotated[
        float,
        typer.Option(
            envvar="CSDCTL_MPI_DEADLINE",
            help="Seconds for all machines to start MPI together, and again for their allreduce.",
        ),
    ] = 60.0,
) -> None:
    """Check that the machines can train together, and report how to fix what fails."""
    from csdctl.terminal.doctor import ExaminationView, doctor_document
    from csdctl.workflows.preflight.doctor import DoctorOptions, examine

    deadlines = DoctorOptions(deadline, connect_deadline, mpi_deadline)
    streams = call.streams
    settings = list_settings(context, call.fleet)
    with ExaminationView(streams.console, call.fleet, settings, is_verbose=streams.is_verbose) as view:
        examination = examine(call.fleet, call.directory, deadlines, view.show)
    view.finish(examination)
    streams.result(doctor_document(examination, settings))
    examination.check()


def list_settings(context: typer.Context, fleet: "Fleet") -> "list[Setting]":
    """Return the settings of one invocation, and those of the fleet file that apply to all machines."""
    from csdctl.fleet.model import Host
    from csdctl.terminal.doctor import Setting

    parameters = {parameter.name: parameter for parameter in context.command.params}
    settings = []
    for name in _SETTINGS:
        value = context.params[name]
        if value is None or name not in parameters:
            continue
        text = ",".join(value) if isinstance(value, list | tuple) else str(value)
        settings.append(Setting(name.replace("_", "-"), text, _source(context, parameters[name], name)))
    in_file = {
        "network": (fleet.network, fleet.network != ""),
        "host.threads": (str(fleet.host.threads), fleet.host != Host()),
    }
    for name, (text, is_set) in in_file.items():
        settings.append(Setting(name, text, f"file {fleet.path}" if is_set else "default"))
    return settings


def _source(context: typer.Context, parameter: object, name: str) -> str:
    source = context.get_parameter_source(name)
    word = _SOURCES.get(source.name, source.name.lower()) if source else "default"
    if word == "environment":
        return f"environment {getattr(parameter, 'envvar', '')}"
    return f"flag {getattr(parameter, 'opts', [''])[0]}" if word == "flag" else word
