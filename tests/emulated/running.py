"""csdctl as a user runs it, in a separate process."""

import subprocess
import sys
from pathlib import Path

CSDCTL = Path(sys.prefix) / "bin" / "csdctl"


def csdctl(
    directory: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CSDCTL), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=400,
        stdin=subprocess.DEVNULL,
    )


def run_python(directory: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the user's."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        stdin=subprocess.DEVNULL,
    )
