"""mpirun of one run: its command and its logs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.launch.mpirun import Mpirun, RankCommand, daemon_marker
from csdctl.runs.directory import ProjectDirectory, RunDirectory

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")), network="10.1.1.0/24")
FACTS = {name: Facts(name, prefix="/opt/venv") for name in ("csd0", "csd1")}
RANKS = [
    RankCommand(rank, name, ("python3", "w.pyz")) for rank, name in enumerate((HOST_NAME, "csd0", "csd1"))
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return ProjectDirectory(tmp_path).new_run()


@pytest.fixture
def mpirun(run: RunDirectory, tmp_path: Path) -> Mpirun:
    fleet = replace(FLEET, path=tmp_path / "fleet.yaml")

    def build_worker_command(machine: str, arguments: Sequence[str]) -> list[str]:
        return ["python3", "w.pyz", *arguments]

    return Mpirun(fleet, FACTS, run, tmp_path, {}, "w.pyz", build_worker_command, {})


def test_command_has_agent_network_prefix_and_run_id(mpirun: Mpirun, run: RunDirectory) -> None:
    command = mpirun.build_command(RANKS)
    assert command[command.index("plm_ssh_agent") + 1] == "sh agent"
    assert command[command.index("--prefix") + 1] == "/opt/venv"
    assert "10.1.1.0/24" in command
    assert daemon_marker(run.run_id) in command
    assert command.count("--host") == len(RANKS)


def test_only_the_prefixes_of_the_given_ranks_must_agree(mpirun: Mpirun) -> None:
    mixed = replace(mpirun, facts={**FACTS, "csd1": Facts("csd1", prefix="/opt/other")})
    assert mixed.build_command(RANKS[:2])
    with pytest.raises(InputError, match="/opt/other, /opt/venv"):
        mixed.build_command(RANKS)
