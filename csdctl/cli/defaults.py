"""The user's own defaults of options: ~/.config/csdctl/config.yaml.

    all: {fleet: ~/fleets/lab.yaml}
    train: {min-nodes: 3, checkpoint-seconds: 300}

Options and environment variables of a command line come before it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from csdctl.errors import InputError

ALL = "all"
"""The section of options for every command that has them."""


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the user's defaults, below XDG_CONFIG_HOME or ~/.config."""
    base = environment.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path("~/.config").expanduser()) / "csdctl" / "config.yaml"


def load_defaults(path: Path, app: typer.Typer, arguments: Sequence[str]) -> dict[str, Any]:
    """Return typer's default map for the command of `arguments`; {} without a file.

    Raises InputError for a file that cannot be read, and for commands and options that do not exist.
    """
    if not path.is_file():
        return {}
    from csdctl.documents import load_text
    from csdctl.documents.yaml_text import parse_yaml

    _, content = parse_yaml(load_text(path), str(path))
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected commands with their options, such as `train: {{keep: 5}}`")
    root: Any = typer.main.get_command(app)
    known = list(root.commands)
    for name, section in content.items():
        if name not in (ALL, *known):
            raise InputError(f"{path}: unknown command {name!r}", remedy=f"one of {', '.join((ALL, *known))}")
        if not isinstance(section, dict):
            raise InputError(f"{path}: {name}: received {section!r}, expected options and values")
    name = next((word for word in arguments if word in known), None)
    if name is None:
        return {}
    of_all, own = content.get(ALL, {}), content.get(name, {})
    return {name: _of_command(root.commands[name], of_all, own, f"{path}: {name}")}


def _of_command(command: Any, of_all: dict[str, Any], own: dict[str, Any], where: str) -> dict[str, Any]:
    if children := getattr(command, "commands", None):  # of a group, such as `emulate up`
        for child in own:
            if child not in children or not isinstance(own[child], dict):
                raise InputError(f"{where}: received {child!r}, expected options of {' or '.join(children)}")
        of_child = {
            child: _of_command(found, of_all, own.get(child, {}), f"{where} {child}")
            for child, found in children.items()
        }
        return {child: defaults for child, defaults in of_child.items() if defaults}
    names = {
        option.lstrip("-"): parameter
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and parameter.name not in ("help", "yes")
    }
    if unknown := [option for option in own if option not in names]:
        raise InputError(f"{where} has no option {unknown[0]!r}", remedy=f"one of {', '.join(sorted(names))}")
    given = {option: value for option, value in of_all.items() if option in names} | own
    return {
        names[option].name: _check_value(names[option], value, f"{where}: {option}")
        for option, value in given.items()
    }


def _check_value(parameter: Any, value: object, where: str) -> object:
    """Return `value` with `~` expanded; raises InputError for a list, or none, where the option differs."""
    if isinstance(value, list) != parameter.multiple:
        expected = "a list" if parameter.multiple else "one value"
        raise InputError(f"{where}: received {value!r}, expected {expected}")
    values = value if isinstance(value, list) else [value]
    expanded = [
        str(Path(one).expanduser()) if isinstance(one, str) and one.startswith("~/") else one
        for one in values
    ]
    return expanded if parameter.multiple else expanded[0]
