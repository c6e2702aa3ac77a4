"""mpirun of one run: its ssh_config, its command, its logs."""

from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.launch.mpi_command import RankCommand, daemon_marker
from csdctl.launch.mpirun import Mpirun, prepare_mpirun
from csdctl.runs.directory import ProjectDirectory, RunDirectory

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")), network="10.1.1.0/24")
FACTS = {name: Facts(name, prefix="/opt/venv") for name in ("csd0", "csd1")}
RANKS = [RankCommand(name, ("python3", "worker")) for name in (HOST_NAME, "csd0", "csd1")]


@pytest.fixture
def project(tmp_path: Path) -> ProjectDirectory:
    return ProjectDirectory(tmp_path)


@pytest.fixture
def run(project: ProjectDirectory) -> RunDirectory:
    return project.new_run()


@pytest.fixture
def mpirun(project: ProjectDirectory, run: RunDirectory) -> Mpirun:
    fleet = replace(FLEET, path=project.root / "fleet.yaml")
    return prepare_mpirun(fleet, FACTS, project, run, project.ssh_config)


def test_ssh_config_has_every_node(mpirun: Mpirun, project: ProjectDirectory) -> None:
    config = project.ssh_config.read_text()
    assert "Host csd0\n" in config
    assert "Host csd1\n" in config


def test_command_has_config_network_prefix_and_run_id(mpirun: Mpirun, run: RunDirectory) -> None:
    command = mpirun.build_command(RANKS)
    assert "ssh -F .csdctl/ssh_config" in command, "relative to the project, where mpirun starts"
    assert command[command.index("--prefix") + 1] == "/opt/venv"
    assert "10.1.1.0/24" in command
    assert daemon_marker(run.run_id) in command
    assert command.count("--host") == len(RANKS)


def test_only_the_prefixes_of_the_given_ranks_must_agree(mpirun: Mpirun) -> None:
    mixed = replace(mpirun, facts={**FACTS, "csd1": Facts("csd1", prefix="/opt/other")})
    assert mixed.build_command(RANKS[:2])
    with pytest.raises(InputError, match="/opt/other, /opt/venv"):
        mixed.build_command(RANKS)


def test_logs_are_in_the_run_directory(mpirun: Mpirun, run: RunDirectory) -> None:
    assert mpirun.log_path(None) == run.mpirun_log
    assert mpirun.log_path(2) == run.rank_log(2)
