"""csdctl as a benchmark runs it: in a process of its own, its answers as JSON."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from csdctl.job.model import load_job

CSDCTL = Path(sys.prefix) / "bin" / "csdctl"


def csdctl(directory: Path, *arguments: str) -> list[Any]:
    """The documents that the command wrote with --json; its words for people go to the terminal."""
    done = subprocess.run(
        [str(CSDCTL), *arguments, "--json"], cwd=directory, stdout=subprocess.PIPE, text=True, check=True
    )
    return read_documents(done.stdout)


def read_documents(output: str) -> list[Any]:
    """What a command wrote with --json: one document, or one a line."""
    try:
        return [json.loads(output)]
    except ValueError:
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def write_plan(directory: Path, job: str, ranks: Sequence[dict[str, Any]]) -> None:
    """plan.yaml with these ranks, for the job file `job`."""
    path = directory / job
    plan = {
        "job": path.stem,
        "job_fingerprint": load_job(path).fingerprint(),
        "method": "by hand",
        "ranks": list(ranks),
    }
    (directory / "plan.yaml").write_text(yaml.safe_dump(plan))
