"""`csdctl tune` in the lab, and what it says of its work."""

import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.running import read_documents
from tests.lab.project import Project

DEADLINE_S = 1800.0
PROBED = re.compile(r"(?:^ {2}|\| {2})([\w-]+)(?: \d+)?: ")
"""A machine in a line that tells of a round of probes: `  host 16: 0.08 s, …  |  slow0 4: …`."""


@dataclass(frozen=True)
class Tuned:
    """The plan as the command gave it, and how it came about."""

    plan: dict[str, Any]
    words: str
    """What the command said."""
    wall_s: float

    @property
    def num_trials(self) -> int:
        return self.words.count("trying the plan")

    def num_probes_by_class(self) -> dict[str, int]:
        """Machines of one class have one name but for the number at its end."""
        rounds = [line for line in self.words.splitlines() if "/s" in line or "does not fit" in line]
        names = [name for line in rounds for name in PROBED.findall(line)]
        return Counter(name.rstrip("0123456789") for name in names)

    def tell(self, name: str) -> None:
        of_class = ", ".join(f"{one} {count}" for one, count in self.num_probes_by_class().items())
        print(
            f"{name}: {self.plan['num_probes']} probes ({of_class or 'none'}), {self.num_trials} trials, "
            f"{self.plan['measuring_s']:.1f} s of measuring, {self.wall_s:.0f} s in all; "
            f"batch sizes {[rank['batch_size'] for rank in self.plan['ranks']]}"
        )


def tune(project: Project, *arguments: str) -> Tuned:
    """Tune, and echo what it says and after how many seconds."""
    began = time.monotonic()
    words = ""
    with project.start("tune", *arguments, "--json") as running:
        assert running.stdout
        assert running.stderr
        for line in running.stderr:
            words += line
            print(f"    {time.monotonic() - began:5.0f} s  {line}", end="", flush=True)
        documents = read_documents(running.stdout.read())
    assert running.returncode == 0, words
    return Tuned(documents[-1], words, time.monotonic() - began)


def run_csdctl(project: Project, *arguments: str) -> tuple[list[Any], str]:
    """csdctl on the lab's host: its documents, and its words for people."""
    done = project.csdctl(*arguments, "--json", deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return read_documents(done.stdout), done.stderr


def plan_path(project: Project, job: str) -> Path:
    return project.path / ".csdctl" / "plans" / f"{job}.yaml"
