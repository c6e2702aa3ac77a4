"""The one place that starts mpirun: its ssh_config, its command line, and the job that runs it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.documents import save_text
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import Fleet
from csdctl.launch.mpi_command import RankCommand, build_mpirun_command
from csdctl.launch.mpi_job import MpiJob
from csdctl.launch.tools import choose_prefix, find_mpirun
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.transport.many import fleet_known_hosts_paths
from csdctl.transport.ssh_config import build_ssh_config


@dataclass(frozen=True)
class Mpirun:
    """mpirun for one run: everything but the ranks' commands; made by `prepare_mpirun`."""

    fleet: Fleet
    facts: Mapping[str, Facts]
    run: RunDirectory
    directory: Path
    """The project directory, where mpirun starts."""
    ssh_config: Path
    """Below `directory`."""

    def build_command(self, ranks: Sequence[RankCommand]) -> list[str]:
        """Return mpirun's argument list for `ranks`, in order of rank.

        Raises CsdctlError without a usable mpirun, InputError when the nodes' Python prefixes differ.
        """
        return build_mpirun_command(
            find_mpirun(),
            choose_prefix([rank.node for rank in ranks if not rank.is_local], self.facts),
            self.ssh_config.relative_to(self.directory),
            self.fleet.network,
            ranks,
            run_id=self.run.run_id,
        )

    def build_job(self, ranks: Sequence[RankCommand]) -> MpiJob:
        """Return the job over `ranks`, not yet started; raises what `build_command` raises."""
        nodes = [rank.node for rank in ranks]
        return MpiJob(self.build_command(ranks), nodes, self.log_path, self.directory, os.environ)

    def log_path(self, rank: int | None) -> Path:
        """The log file of a rank; with None, the log file of mpirun itself."""
        return self.run.mpirun_log if rank is None else self.run.rank_log(rank)


def prepare_mpirun(
    fleet: Fleet,
    facts: Mapping[str, Facts],
    project: ProjectDirectory,
    run: RunDirectory,
    ssh_config: Path,
) -> Mpirun:
    """Write the ssh_config that mpirun's ssh reads; raises InputError for a path it cannot name."""
    known_hosts = fleet_known_hosts_paths(fleet, project.root)
    save_text(ssh_config, build_ssh_config(fleet.nodes, known_hosts))
    return Mpirun(fleet, facts, run, project.root, ssh_config)
