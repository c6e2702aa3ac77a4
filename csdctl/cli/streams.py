"""Where output goes: results to stdout; with --json, human-readable output to stderr."""

import json
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from csdctl.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console


VERBOSE = ("-v", "-vv")
"""Accepted anywhere, as in `csdctl train -vv`, and not passed on to the commands."""


@dataclass
class Streams:
    """The streams, the terminal and the directory of one invocation; a test passes its own."""

    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    directory: Path = field(default_factory=Path.cwd)
    is_json: bool = False
    is_verbose: bool = field(default_factory=lambda: any(word in VERBOSE for word in sys.argv))
    is_debugging: bool = field(default_factory=lambda: "-vv" in sys.argv)
    """Whether errors are printed with their traceback."""

    @cached_property
    def errors(self) -> "Console":
        """Standard error."""
        from rich.console import Console  # importing it takes a sixth of the time of --help

        return Console(file=self.stderr, stderr=True, highlight=False, soft_wrap=True)

    @cached_property
    def console(self) -> "Console":
        """Where tables and messages go: standard output, or standard error with --json."""
        from rich.console import Console

        return self.errors if self.is_json else Console(file=self.stdout, highlight=False)

    def say(self, line: str) -> None:
        """Print one human-readable line."""
        self.console.print(line, markup=False, soft_wrap=True)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask at the terminal unless `yes`; raises InputError for a no, or without a terminal."""
        if yes:
            return
        if not (sys.stdin.isatty() and self.stderr.isatty()):
            raise InputError(f"{question} No terminal is available to answer", remedy="confirm with --yes")
        self.errors.print(f"{question} \\[y/N]", end=" ")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InputError("not confirmed: nothing was done")

    def result(self, document: object) -> None:
        """Write one JSON document to standard output; nothing without --json."""
        if self.is_json:
            json.dump(document, self.stdout, indent=2)
            self.stdout.write("\n")
            self.stdout.flush()

    def result_line(self, document: object) -> None:
        """Write one JSON line to standard output; nothing without --json."""
        if self.is_json:
            self.stdout.write(json.dumps(document) + "\n")
            self.stdout.flush()
