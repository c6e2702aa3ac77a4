"""Run csdctl for a benchmark: in a separate process, with its output as JSON."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from csdctl.job.model import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"
CSDCTL = Path(sys.prefix) / "bin" / "csdctl"


def csdctl(directory: Path, *arguments: str) -> list[Any]:
    """Return the documents that the command printed with --json; its messages go to the terminal."""
    done = subprocess.run(
        [str(CSDCTL), *arguments, "--json"], cwd=directory, stdout=subprocess.PIPE, text=True, check=True
    )
    return read_documents(done.stdout)


def read_documents(output: str) -> list[Any]:
    """Parse what a command printed with --json: one document, or one per line."""
    try:
        return [json.loads(output)]
    except ValueError:
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def write_plan(directory: Path, job: str, ranks: Sequence[dict[str, Any]]) -> None:
    """Write plan.yaml with these ranks, for the job file `job`."""
    path = directory / job
    plan = {
        "job": path.stem,
        "job_fingerprint": load_job(path).fingerprint(),
        "method": "manual",
        "ranks": list(ranks),
    }
    (directory / "plan.yaml").write_text(yaml.safe_dump(plan))


def place_sample(directory: Path, name: str, *options: str) -> None:
    """Write a sample data set to `directory` and its nodes."""
    command = [sys.executable, str(EXAMPLES / "sample_data.py"), name, *options]
    subprocess.run(command, cwd=directory, check=True)
