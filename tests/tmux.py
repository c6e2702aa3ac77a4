"""A real terminal for tests."""

import os
import subprocess
from pathlib import Path

from tests.needs import require


class Tmux:
    """A tmux server of its own, with one terminal."""

    def __init__(self, directory: Path) -> None:
        require("tmux")
        fixed = ("COLUMNS", "LINES")  # Rich would take them for the size
        self._environment = {name: value for name, value in os.environ.items() if name not in fixed}
        self._call = ["tmux", "-S", str(directory / "tmux"), "-f", "/dev/null"]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._call, *arguments], capture_output=True, text=True, check=True, env=self._environment
        )
        return done.stdout

    def close(self) -> None:
        """End the server, which has ended by itself if its last program has."""
        subprocess.run([*self._call, "kill-server"], capture_output=True, check=False, env=self._environment)

    def screen(self, *, with_scrollback: bool = False) -> list[str]:
        """Return the lines on the screen, after those that scrolled off it if `with_scrollback`."""
        start = ["-S", "-"] if with_scrollback else []
        return [line.rstrip() for line in self.run("capture-pane", "-p", *start).splitlines()]
