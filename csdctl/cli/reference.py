"""The reference of the command line as Markdown, generated from the command tree.

`make docs` writes it beside the other pages of the reference; it is not committed.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import typer

HEADER = """\
# Command line

See also: [exit codes](exit-codes.md), [file formats](files.md).
"""


def list_commands(app: typer.Typer) -> list[tuple[str, Any]]:
    """Return every command and group with its full name (`csdctl emulate up`), in the order of the help."""
    root = typer.main.get_command(app)
    return list(_walk(str(root.name), root))


def render_reference(app: typer.Typer) -> str:
    """Return the whole reference; it does not depend on the terminal."""
    sections = [_render_command(name, command) for name, command in list_commands(app)]
    return "\n".join([HEADER, *sections])


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child in getattr(command, "commands", {}).values():
        if not child.hidden:
            yield from _walk(f"{name} {child.name}", child)


def _render_command(name: str, command: Any) -> str:
    context = typer.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", inspect.cleandoc(command.help or ""), f"```text\n{usage}\n```"]
    children = [child for child in getattr(command, "commands", {}).values() if not child.hidden]
    if children:
        rows = [(f"[`{child.name}`](#{_anchor(f'{name} {child.name}')})", child.help) for child in children]
        parts.append(_table("command", rows))
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    parts.append(_table("argument or option", [(f"`{name}`", text) for name, text in filter(None, records)]))
    if command.epilog:
        parts.append(command.epilog)
    return "\n\n".join(parts) + "\n"


def _table(heading: str, rows: list[tuple[str, str | None]]) -> str:
    lines = [f"| {heading} | meaning |", "|---|---|"]
    return "\n".join(lines + [f"| {_cell(name)} | {_cell(_first_paragraph(text))} |" for name, text in rows])


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def main() -> None:
    """Print the reference of csdctl."""
    from csdctl.cli.app import app

    sys.stdout.write(render_reference(app))


if __name__ == "__main__":
    main()
