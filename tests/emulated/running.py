"""csdctl as a user runs it, in a separate process, and emulated fleets that it runs on."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from csdctl.transport.commands import find_state_directory
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


def succeed(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run csdctl, which must succeed."""
    done = csdctl(directory, *arguments)
    assert done.returncode == 0, f"csdctl {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert "Traceback" not in done.stdout + done.stderr
    return done


def document(directory: Path, *arguments: str) -> dict[str, Any]:
    """Run csdctl with --json, which must succeed; return the document, the last one of several."""
    printed = succeed(directory, *arguments, "--json").stdout
    try:
        result: dict[str, Any] = json.loads(printed)
    except ValueError:
        result = json.loads(printed.splitlines()[-1])
    return result


def refuse(directory: Path, *arguments: str, code: int = 2, environment: dict[str, str] | None = None) -> str:
    """Run csdctl, which must end with `code` and without a traceback; return its words in one line."""
    done = csdctl(directory, *arguments, environment=environment)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    said = " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in said
    return said


def check_documents(printed: str) -> None:
    """Assert that docs/generate.py describes every document that was printed: one, or one a line."""
    try:
        documents = [json.loads(printed)]
    except ValueError:
        try:
            documents = [json.loads(line) for line in printed.splitlines()]
        except ValueError:
            return  # cut off with its process: a matter of the test
    for document in documents:
        if "schema" in document:  # events have none
            check_document(document)


@contextmanager
def emulated(
    directory: Path, num_nodes: int, files: Mapping[str, str] = {}, *, cpu: float = 1
) -> Iterator[Path]:
    """Keep an emulated fleet up in `directory`, which gets `files`; yield the directory."""
    for name, text in files.items():
        (directory / name).write_text(text)
    try:
        succeed(directory, "emulate", "up", "--nodes", str(num_nodes), "--cpu", str(cpu))
        yield directory
    finally:
        csdctl(directory, "emulate", "down")


def home_of(directory: Path, node: str) -> Path:
    return directory / ".csdctl" / "emulated" / "nodes" / node / "home"


def state_of(directory: Path, node: str) -> Path:
    """Return the directory that csdctl's programs start in on a node."""
    return find_state_directory(str(home_of(directory, node) / ".csdctl"))
