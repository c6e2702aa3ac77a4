"""Where output goes: results to stdout. With --json, human-readable output to stderr.

Everything passes through here or through the console of `csdctl.terminal.console`, and is made printable.
"""

import io
import json
import os
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TextIO

from csdctl.errors import CsdctlError, InputError
from csdctl.notify import DETACHED, make_printable

if TYPE_CHECKING:
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.terminal.console import PrintableConsole


class PrintableStream:
    """A standard stream on which whatever is written is made printable, also what Python itself writes."""

    def __init__(self, terminal: TextIO, *, is_dated: bool = False) -> None:
        """With `is_dated`, every line begins with its time, as `DATED`."""
        self.is_dated = self._is_new_line = is_dated
        self.terminal = terminal
        self.has_text = False

    def write(self, text: str) -> int:
        """Write `text`, made printable."""
        self.has_text = True
        for line in io.StringIO(text) if self.is_dated else (text,):
            time = datetime.now().astimezone().isoformat(timespec="milliseconds")
            self.terminal.write((f"{time} " if self._is_new_line else "") + make_printable(line))
            self._is_new_line = self.is_dated and line.endswith("\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all `lines`, made printable."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def protect_standard_streams() -> None:
    """Make everything printable that this process writes, also for the encoding of the terminal."""
    is_dated = bool(os.environ.pop(DETACHED, ""))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, PrintableStream(stream, is_dated=is_dated))


@dataclass
class Streams:
    """The streams, the terminal and the directory of one invocation. A test passes its own."""

    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    directory: Path = field(default_factory=Path.cwd)
    is_json: bool = False
    is_verbose: bool = False
    is_debugging: bool = False
    """Whether errors are printed with their traceback."""
    is_quiet: bool = False

    @cached_property
    def errors(self) -> "PrintableConsole":
        """Standard error."""
        return _open_console(_terminal_of(self.stderr), stderr=True, soft_wrap=True)

    @cached_property
    def console(self) -> "PrintableConsole":
        """Where tables and messages go: standard output, or standard error with --json."""
        return self.errors if self.is_json else _open_console(_terminal_of(self.stdout))

    @cached_property
    def views(self) -> "PrintableConsole":
        """Where live views and their lines go: the console. Nowhere if the user wants only results."""
        return _open_console(io.StringIO(), quiet=True) if self.is_quiet else self.console

    @cached_property
    def project(self) -> "ProjectDirectory":
        """The project in the directory of the invocation."""
        from csdctl.runs.directory import ProjectDirectory

        return ProjectDirectory(self.directory)

    def say(self, line: str) -> None:
        """Print one human-readable line, unless the user wants only results."""
        if not self.is_quiet:
            self.console.print(line, soft_wrap=True)

    def write(self, text: str) -> None:
        """Write text of several lines to standard output as it is, apart from what is not printable."""
        self.stdout.write(make_printable(text))

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask at the terminal unless `yes`. Raises InputError for a no, or without a terminal."""
        if yes:
            return
        if not (sys.stdin.isatty() and self.stderr.isatty()):
            raise InputError(f"{question} There is no terminal to answer on", remedy="confirm with --yes")
        self.errors.print(f"{question} [y/N]", end=" ")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InputError("not confirmed: nothing was done")

    def result(self, content: object, *, indent: int | None = 2) -> None:
        """Write one JSON document to standard output. Nothing without --json."""
        if self.is_json:
            self.stdout.write(format_json(content, indent=indent) + "\n")
            self.stdout.flush()

    def result_line(self, content: object) -> None:
        """Write one JSON line to standard output. Nothing without --json."""
        self.result(content, indent=None)


def document(
    schema: str, *parts: object, without: Collection[str] = (), **fields: object
) -> dict[str, object]:
    """Return the document `schema` with the fields of `parts`, apart from `without`, and more `fields`."""
    content: dict[str, object] = {"schema": schema}
    for part in parts:
        content |= fields_of(part)
    return {name: value for name, value in content.items() if name not in without} | fields


def fields_of(value: Any) -> dict[str, object]:
    """Return the fields of a dataclass or a pydantic model, and the properties in its JSON_PROPERTIES."""
    names = [part.name for part in fields(value)] if is_dataclass(value) else [*type(value).model_fields]
    return {name: getattr(value, name) for name in (*names, *getattr(value, "JSON_PROPERTIES", ()))}


def format_json(content: object, *, indent: int | None = None) -> str:
    """Return `content` as JSON: errors as message and remedy, NaN and infinity as null."""
    try:
        return json.dumps(content, indent=indent, default=_as_json, allow_nan=False)
    except ValueError:
        plain = json.loads(json.dumps(content, default=_as_json), parse_constant=lambda _: None)
        return json.dumps(plain, indent=indent)


def _as_json(value: object) -> object:
    if isinstance(value, CsdctlError):
        return {"message": value.message, "remedy": value.remedy}
    if isinstance(value, PurePath):
        return str(value)
    if is_dataclass(value) or hasattr(value, "model_fields_set"):  # pydantic is slow to load
        return fields_of(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


def _open_console(file: TextIO, **settings: Any) -> "PrintableConsole":
    from csdctl.terminal.console import PrintableConsole  # with Rich, a sixth of the time of --help

    return PrintableConsole(file=file, **settings)


def _terminal_of(stream: TextIO) -> TextIO:
    return stream.terminal if isinstance(stream, PrintableStream) and not stream.is_dated else stream
