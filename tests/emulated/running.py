"""csdctl as a user runs it, in a separate process."""

import json
import subprocess
import sys
from pathlib import Path

from tests.json_page import check_document
from tests.patience import run_command

CSDCTL = Path(sys.prefix) / "bin" / "csdctl"


def csdctl(
    directory: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = run_command([str(CSDCTL), *arguments], cwd=directory, env=environment)
    if "--json" in arguments:
        check_documents(done.stdout)
    return done


def check_documents(printed: str) -> None:
    """Assert that docs/generate.py describes every document that was printed: one, or one a line."""
    try:
        found = [json.loads(printed)]
    except ValueError:
        try:
            found = [json.loads(line) for line in printed.splitlines()]
        except ValueError:
            return  # cut off with its process: a matter of the test
    for document in found:
        if "schema" in document:  # events have none
            check_document(document)


def run_python(directory: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the user's."""
    return run_command([sys.executable, "-c", program], cwd=directory)
