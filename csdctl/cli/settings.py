"""The settings of an invocation, and the source of each: flag, environment, file or default."""

from dataclasses import dataclass

import typer

from csdctl.fleet.model import Fleet, Host

_SHOWN = ("fleet", "deadline", "connect_deadline", "mpi_deadline", "limit", "exclude", "job")
_SOURCES = {
    "COMMANDLINE": "flag",
    "ENVIRONMENT": "environment",
    "DEFAULT": "default",
    "DEFAULT_MAP": "file config.yaml",
}


@dataclass(frozen=True)
class Setting:
    """A setting in effect; `source` names the flag, the variable or the file."""

    name: str
    value: str
    source: str


def list_settings(context: typer.Context, fleet: Fleet) -> list[Setting]:
    """Return the settings of one invocation, and those of the fleet file that apply to all machines."""
    parameters = {parameter.name: parameter for parameter in context.command.params}
    settings = []
    for name in _SHOWN:
        value = context.params[name]
        if value is None or name not in parameters:
            continue
        text = ",".join(value) if isinstance(value, list) else str(value)
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
