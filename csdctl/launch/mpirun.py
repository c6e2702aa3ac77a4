"""The one place that starts mpirun: its command line, its sandbox, and the daemons on the nodes with theirs.

mpirun's sandbox has no SSH keys: it asks csdctl for each daemon (`standalone/agent.py`).
"""

import contextlib
import ipaddress
import os
import secrets
import shlex
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import CsdctlError, DeadlineError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.network import parse_local_addresses
from csdctl.launch.mpi_command import (
    ALLOW_ROOT,
    RankCommand,
    build_mpirun_command,
    check_network,
    choose_prefix,
    find_mpirun,
    rank_marker,
)
from csdctl.launch.mpi_job import MpiJob
from csdctl.runs.directory import RunDirectory
from csdctl.transport.commands import read_program
from csdctl.transport.session import Conversation, Session
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.sandbox import SandboxPolicy, link_address

StartDaemon = Callable[[str, str], Conversation]
"""Start a daemon in a sandbox, from mpirun's name of the machine and a command; raises CsdctlError."""

MAX_REQUEST_BYTES = 1 << 16
MAX_LINES = 1000
"""Of a daemon's output that are passed on."""
REQUEST_DEADLINE_S = 10.0
CLOSE_S, END_DEADLINE_S = 1.0, 3.0
"""For a sandbox to end its processes; what is left then is killed."""
_READ_S = 3600.0
_PEER = struct.Struct("3i")


class DaemonStarter:
    """Listens at an abstract Unix address; every connection asks for one daemon."""

    def __init__(self, address: str, start: StartDaemon) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._running: dict[str, Conversation] = {}
        """By mpirun's name of the machine."""
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + address)
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all daemons, and start no more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        threads = [
            threading.Thread(target=_end, args=(conversation,), daemon=True)
            for conversation in self._running.values()
        ]
        for thread in threads:
            thread.start()
        # Those of lost nodes take longer, and nobody needs to wait for them.
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Start the daemon that is asked for, and pass on its output and exit code."""
        with connection, contextlib.suppress(OSError):
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            if _PEER.unpack(peer)[1] != os.getuid():
                return
            try:
                self._relay(connection, self._start_once(*_read_request(connection)))
            except CsdctlError as error:
                _send(connection, "O", str(error))
                _send(connection, "X", "1")

    def _start_once(self, host: str, command: str) -> Conversation:
        """Start the machine's only daemon; raises CsdctlError."""
        with self._lock:
            if self._is_closed or host in self._running:
                raise CsdctlError(f"the daemon of {host} has been started already")
            conversation = self._running[host] = self._start(host, command)
        return conversation

    def _relay(self, connection: socket.socket, conversation: Conversation) -> None:
        num_lines = 0
        while True:
            try:
                line = conversation.read_line(deadline_s=_READ_S)
            except DeadlineError:
                continue
            except EOFError:
                break
            num_lines += 1
            if num_lines <= MAX_LINES:
                _send(connection, "O", line)
        done = conversation.wait(deadline_s=END_DEADLINE_S)
        for error_line in done.stderr.decode(errors="replace").splitlines()[-MAX_LINES:]:
            _send(connection, "O", error_line)
        _send(connection, "X", str(done.exit_code))


def _read_request(connection: socket.socket) -> tuple[str, str]:
    """Return machine and command; raises CsdctlError."""
    connection.settimeout(REQUEST_DEADLINE_S)
    received = b""
    while more := connection.recv(MAX_REQUEST_BYTES):
        received += more
        if len(received) > MAX_REQUEST_BYTES:
            raise CsdctlError(f"mpirun's request for a daemon is longer than {MAX_REQUEST_BYTES} bytes")
    host, _, command = received.decode(errors="replace").partition("\0")
    return host, command


def _send(connection: socket.socket, kind: str, text: str) -> None:
    connection.sendall(f"{kind} {text.replace(chr(10), ' ')}\n".encode(errors="replace"))


def _end(conversation: Conversation) -> None:
    """Let the sandbox end its processes and remove its files; kill it if it does not."""
    with contextlib.suppress(CsdctlError, EOFError, OSError, ValueError):
        conversation.send_line("")
        conversation.wait(deadline_s=END_DEADLINE_S)
    with contextlib.suppress(CsdctlError):
        conversation.close()


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
