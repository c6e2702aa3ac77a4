"""The one place that starts mpirun: its command line, its sandbox, and those of the daemons on the nodes."""

import ipaddress
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import CsdctlError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.network import parse_local_addresses
from csdctl.launch.daemons import DaemonStarter
from csdctl.launch.mpi_command import ALLOW_ROOT, RankCommand, build_mpirun_command, rank_marker
from csdctl.launch.mpi_job import MpiJob
from csdctl.launch.network import check_network
from csdctl.launch.tools import choose_prefix, find_mpirun
from csdctl.runs.directory import RunDirectory
from csdctl.transport.session import Conversation, Session
from csdctl.transport.standalone import read_program
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.sandbox import SandboxPolicy, link_address

AGENT = "agent"
ANY_NETWORK, LOOPBACK = ("0.0.0.0/0", "::/0"), ("127.0.0.0/8", "::1/128")

BuildWorkerCommand = Callable[[str, Sequence[str]], list[str]]
"""Return the argument list that runs a command of the worker on a machine."""


@dataclass(frozen=True)
class Mpirun:
    """mpirun for one run: everything but the ranks' commands."""

    fleet: Fleet
    facts: Mapping[str, Facts]
    run: RunDirectory
    directory: Path
    """The project directory."""
    sessions: Mapping[str, Session]
    """To the nodes, over which their daemons are started; the newest one of each node."""
    worker_path: str
    """The worker in every machine's store."""
    build_worker_command: BuildWorkerCommand
    obstacles: Mapping[str, str]
    """Machines that cannot run a sandbox, and why: there, MPI runs without."""
    link_key: str = ""
    """That of the ranks' spec."""

    def build_command(self, ranks: Sequence[RankCommand]) -> list[str]:
        """Return mpirun's argument list for `ranks`, in order of rank.

        Raises CsdctlError without a usable mpirun, InputError when the nodes' Python prefixes differ.
        """
        return build_mpirun_command(
            find_mpirun(),
            choose_prefix([rank.node for rank in ranks if not rank.is_local], self.facts),
            AGENT,
            self.fleet.network,
            ranks,
            run_id=self.run.run_id,
        )

    def build_job(self, ranks: Sequence[RankCommand]) -> MpiJob:
        """Return the job over `ranks`, not yet started; raises what `build_command` raises.

        Raises InputError too when the host has no interface over which MPI's daemons can connect.
        """
        if any(not rank.is_local for rank in ranks):
            check_network(self.fleet.network)
        command = self.build_command(ranks)
        key = "" if any(rank.node in self.obstacles for rank in ranks) else secrets.token_hex(32)
        remote = {rank.host: rank for rank in ranks if not rank.is_local}
        address = f"csdctl/{self.run.run_id}/daemons-{secrets.token_hex(4)}"

        def start_daemon(host: str, shell_command: str) -> Conversation:
            if host not in remote:
                raise CsdctlError(f"mpirun asked for a daemon on {host[:80]!r}, which has no rank")
            rank = remote[host]
            shell = ("/bin/sh", "-c", shell_command)
            policy = self._build_policy(rank.node, shell, key, (self._socket_of(rank.number),))
            conversation = self.sessions[rank.node].converse(self._sandbox_command(rank.node))
            conversation.send_line(to_json(policy))
            return conversation

        agent = shlex.join([self.fleet.python_of(HOST_NAME), "-I", "-S", f"{AGENT}.py", address])
        scripts = {AGENT: f'exec {agent} "$@"\n', f"{AGENT}.py": read_program(AGENT)}
        sockets = (address, *(self._socket_of(rank.number) for rank in ranks if rank.is_local))
        policy = self._build_policy(HOST_NAME, command, key, sockets, scripts)
        return MpiJob(
            self._sandbox_command(HOST_NAME),
            [rank.node for rank in ranks],
            self.log_path,
            self.directory,
            {**os.environ, **ALLOW_ROOT},
            first_line=to_json(policy),
            daemons=lambda: DaemonStarter(address, start_daemon),
        )

    def log_path(self, rank: int | None) -> Path:
        """The log file of a rank; with None, the log file of mpirun itself."""
        return self.run.mpirun_log if rank is None else self.run.rank_log(rank)

    def _socket_of(self, rank: int) -> str:
        return link_address(self.run.run_id, rank, self.link_key)

    def _sandbox_command(self, machine: str) -> list[str]:
        marker = rank_marker(self.run.run_id, machine)
        return self.build_worker_command(machine, ["sandbox", "--marker", marker])

    def _build_policy(
        self,
        machine: str,
        command: Sequence[str],
        key: str,
        sockets: tuple[str, ...],
        scripts: Mapping[str, str] | None = None,
    ) -> SandboxPolicy:
        return SandboxPolicy(
            tuple(command),
            machine not in self.obstacles,
            key,
            list_peers(self.fleet),
            sockets,
            (self.fleet.python_of(machine),),
            (self.worker_path,),
            dict(scripts or {}),
        )


def list_peers(fleet: Fleet) -> tuple[str, ...]:
    """Return the networks in which the ranks connect to each other."""
    if not fleet.network:
        return ANY_NETWORK
    if not ipaddress.ip_network(fleet.network).is_loopback:
        return (fleet.network,)
    # All ranks are on this machine. MPI's daemons use another interface than the loopback if there is one.
    own = parse_local_addresses(Path("/proc/net/fib_trie").read_text())
    return (*LOOPBACK, *(f"{address}/32" for address in own))
