"""csdctl on a terminal of its own, and what arrives there."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "from csdctl.cli.app import main; main()"
OWN = re.compile(
    r"\x1b\[(?:\d{1,2}(?:;\d{1,2})*)?m"  # colours of the sixteen, bold, dim
    r"|\x1b\[\d*[AK]"  # live tables: a line up, erase the line
    r"|\x1b\[\?25[lh]"  # hide and show the cursor
    r"|\r(?=\x1b|\r?\n)"  # the begin of a line that is erased next, and the terminal's own line end
)
"""The control codes that Rich makes for csdctl."""


@dataclass(frozen=True)
class Shown:
    """Output of csdctl on its terminal, and its exit code."""

    code: int
    text: str

    @property
    def plain(self) -> str:
        """The text without the control codes that csdctl's own styling makes."""
        return OWN.sub("", self.text)

    @property
    def foreign(self) -> list[str]:
        """Characters that a terminal would obey, or not show, and that are not csdctl's own styling."""
        return sorted({char for char in self.plain if not char.isprintable() and char not in "\n\t"})


def on_terminal(directory: Path, *arguments: str, rows: int = 50, columns: int = 100) -> Shown:
    """Run csdctl with a terminal as its standard input, output and error."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    for name in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=directory,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    received = b""
    with contextlib.suppress(OSError):  # EIO: no process has the terminal open any more
        while chunk := os.read(master, 1 << 16):
            received += chunk
    os.close(master)
    return Shown(process.wait(), received.decode(errors="surrogateescape"))
