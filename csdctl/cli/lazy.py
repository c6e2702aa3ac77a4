"""Commands that are imported when they are run, not when they are listed: `csdctl --help` starts fast.

The list is plain text: typer's own panels load Markdown and syntax highlighting, which takes several times
as long as everything else.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

CommandTable = Mapping[str, Mapping[str, str]]
"""Heading → name of a command → the first line of its help."""


class LazyCommands(Mapping[str, Any]):
    """Commands by name; each is built from csdctl.cli.commands.NAME when it is looked up."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._built:
            self._built[name] = _build(name)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def lazy_group(table: CommandTable) -> type[TyperGroup]:
    """Return a group with the commands of `table`, listed under its headings."""

    class Group(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: Any = LazyCommands([name for section in table.values() for name in section])

        def list_commands(self, ctx: Any) -> list[str]:
            return list(self.commands)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            for heading, section in table.items():
                with formatter.section(heading):
                    formatter.write_dl(list(section.items()))

    return Group


def _build(name: str) -> Any:
    module = import_module(f"csdctl.cli.commands.{name}")
    app = getattr(module, "app", None)  # a group of commands
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name)(getattr(module, name))
    command = typer.main.get_command(app)
    command.name = name
    return command
