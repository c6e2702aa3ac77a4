"""Five minutes of faults on each fleet, judged by the oracles of soak.py."""

import json
import sys
from pathlib import Path

import pytest

from tests.needs import require
from tests.patience import run_command

pytestmark = pytest.mark.thorough
REPOSITORY = Path(__file__).parents[2]
SECONDS = 300
SEEDS = [("emulated", 11), ("lab", 12)]


@pytest.mark.emulated
@pytest.mark.lab
@pytest.mark.timeout(5400)  # the replay takes as many steps as the training
@pytest.mark.parametrize(("fleet", "seed"), SEEDS)
def test_run_survives_five_minutes_of_faults(fleet: str, seed: int, tmp_path: Path) -> None:
    require("lab")
    command = ["-m", "tests.soak.soak", "--fleet", fleet, "--seconds", str(SECONDS)]
    arguments = ["--seed", str(seed), "--keep", str(tmp_path / "kept")]
    done = run_command([sys.executable, *command, *arguments], cwd=REPOSITORY)
    assert done.stdout, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["problems"] == []
    assert outcome["hashes"] > 0
    assert sum(outcome["faults"].values()) > 0
