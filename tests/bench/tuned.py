"""Run `csdctl tune` in the lab, and parse its messages."""

import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.running import read_documents
from tests.lab.project import Project

PROBED = re.compile(r"(?:^ {2}|\| {2})([\w-]+)(?: \d+)?: ")
"""A machine in a line that reports a round of probes: `  host 16: 0.08 s, …  |  slow0 4: …`."""


@dataclass(frozen=True)
class Tuned:
    """The plan from the command's JSON output, and how it was measured."""

    plan: dict[str, Any]
    messages: str
    """The command's messages."""
    wall_s: float

    @property
    def num_trials(self) -> int:
        return self.messages.count("trying the plan")

    def num_probes_by_class(self) -> dict[str, int]:
        """Return the number of probes by class: names in a class differ only in their final number."""
        rounds = [line for line in self.messages.splitlines() if "/s" in line or "does not fit" in line]
        names = [name for line in rounds for name in PROBED.findall(line)]
        return Counter(name.rstrip("0123456789") for name in names)

    def print(self, name: str) -> None:
        of_class = ", ".join(
            f"{class_name} {count}" for class_name, count in self.num_probes_by_class().items()
        )
        print(
            f"{name}: {self.plan['num_probes']} probes ({of_class or 'none'}), {self.num_trials} trials, "
            f"{self.plan['measuring_s']:.1f} s of measuring, {self.wall_s:.0f} s in all; "
            f"batch sizes {[rank['batch_size'] for rank in self.plan['ranks']]}"
        )


def tune(project: Project, *arguments: str) -> Tuned:
    """Tune, and echo each message with the seconds since the start."""
    start = time.monotonic()
    messages = ""
    with project.start("tune", *arguments, "--json") as running:
        assert running.stdout
        assert running.stderr
        for line in running.stderr:
            messages += line
            print(f"    {time.monotonic() - start:5.0f} s  {line}", end="", flush=True)
        documents = read_documents(running.stdout.read())
    assert running.returncode == 0, messages
    return Tuned(documents[-1], messages, time.monotonic() - start)


def run_csdctl(project: Project, *arguments: str) -> tuple[list[Any], str]:
    """Run csdctl on the lab's host; return its documents and its messages."""
    done = project.csdctl(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return read_documents(done.stdout), done.stderr


def plan_path(project: Project, job: str) -> Path:
    return project.path / ".csdctl" / "plans" / f"{job}.yaml"
