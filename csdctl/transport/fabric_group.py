"""Fabric connections to the nodes of a fleet: csdctl's SSH connections under Fabric's interface.

Fabric accepts every host key, keeps all output, and leaves a command that it gives up running on the
machine. Here the host keys are those that `csdctl trust` accepted, output is bounded, and a command that is
ended takes its process group with it. Everything else is Fabric's own code.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import fabric
import paramiko
from fabric.runners import Remote
from invoke.runners import Local

from csdctl.errors import RemoteCommandError
from csdctl.fleet.model import Fleet, Node
from csdctl.transport.commands import MarkedOutput, build_wrapped_command
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.many import check_open_files, fleet_known_hosts_paths, run_on_all
from csdctl.transport.session import MAX_OUTPUT_BYTES, Deadline, bounded
from csdctl.transport.ssh import JumpHosts, channel_error, kill_group, lost_connection_error, open_transport
from csdctl.transport.strict_transport import LOST, request_exec

START_DEADLINE_S = 30.0
SFTP_DEADLINE_S = 60.0
"""Maximum time without any byte of a file transfer."""

_LOGIN_SHELL = 'exec "${SHELL:-/bin/sh}" -c "$1"'


@dataclass(frozen=True)
class FleetLink:
    """Connections to jump hosts, and deadlines, shared by the connections of a fleet."""

    jumps: JumpHosts
    connect_deadline_s: float
    command_deadline_s: float | None


class FleetConnection(fabric.Connection):  # type: ignore[misc]
    """A fabric.Connection to a node. `printed` are the streams `out` and `err` that its commands print to."""

    # Fabric stores an attribute that the class lacks as a key of its configuration.
    node: Node = None  # type: ignore[assignment]
    printed: Mapping[str, TextIO] = None  # type: ignore[assignment]
    _link: FleetLink = None  # type: ignore[assignment]
    _runners: "set[FleetRemote]" = None  # type: ignore[assignment]

    def __init__(
        self, node: Node, link: FleetLink, folder: Path | None, printed: Mapping[str, TextIO]
    ) -> None:
        self._set(node=node, printed=printed, _link=link, _runners=set())
        config = fabric.Config(
            overrides={
                "load_ssh_configs": False,  # the fleet file has the addresses
                "gateway": None,
                "runners": {"remote": FleetRemote, "local": FleetLocal},
                "run": {"in_stream": False},
                "timeouts": {"command": link.command_deadline_s},
            }
        )
        if folder:
            config.set_project_location(str(folder))
            config.load_project()
        super().__init__(node.address, user=node.user, port=node.port, config=config, gateway=False)

    def open(self) -> None:
        """Connect, unless connected. Raises UnreachableError, HostKeyError, AuthenticationError."""
        if not self.is_connected:
            link = self._link
            transport = open_transport(self.node, Deadline(link.connect_deadline_s), link.jumps)
            transport.channel_timeout = START_DEADLINE_S
            self.transport = transport
            self.client = SimpleNamespace(
                open_sftp=lambda: paramiko.SFTPClient.from_transport(transport), close=transport.close
            )

    def close(self) -> None:
        """End running commands on the node, and close the connection."""
        for runner in list(self._runners):
            runner.kill()
        with contextlib.suppress(*LOST):
            super().close()

    def sftp(self) -> paramiko.SFTPClient:
        """Return the SFTP client of the connection. Raises RemoteCommandError if the node has no SFTP."""
        try:
            client: paramiko.SFTPClient = super().sftp()
        except LOST as error:
            problem = f"its SSH server offers no SFTP, which `put` and `get` need ({bounded(error)})"
            remedy = "add `Subsystem sftp internal-sftp` to its sshd_config, or use csdctl deploy"
            raise RemoteCommandError(problem, node=self.node.name, remedy=remedy) from None
        client.get_channel().settimeout(SFTP_DEADLINE_S)  # type: ignore[union-attr]
        return client

    def get(self, remote: Any, local: Any = None, **options: Any) -> Any:
        """Do what Fabric's `get` does. `{host}` in a local path is the name of the node."""
        if isinstance(local, str):  # nodes behind different jump hosts may have the same address
            local = local.replace("{host}", self.node.name)
        return super().get(remote, local, **options)

    def _identity(self) -> tuple[Any, ...]:
        return (self.node.name, *super()._identity())


def _redirect(runner: Any) -> None:
    """Let a command print to its connection's streams. An `out_stream` would also get what the task hides."""
    for name, default in (("out", sys.stdout), ("err", sys.stderr)):
        if runner.streams[name] is default:
            runner.streams[name] = runner.context.printed.get(name, default)


class FleetLocal(Local):
    """A command of c.local, on the host."""

    def start(self, command: str, shell: str, env: dict[str, str]) -> None:
        """Start `command`."""
        _redirect(self)
        super().start(command, shell, env)


class FleetRemote(Remote):  # type: ignore[misc]
    """A command on a node: bounded output, and no process is left behind when it is ended."""

    channel: Any = None
    _was_killed = False

    def start(self, command: str, shell: str, env: dict[str, str], timeout: float | None = None) -> None:
        """Start `command` in the login shell of the node's user. Raises UnreachableError, NodeError."""
        self._marked: dict[str, MarkedOutput] = {}
        self._num_left = {"stdout": MAX_OUTPUT_BYTES, "stderr": MAX_OUTPUT_BYTES}
        if not self._disowned:
            self.context._runners.add(self)
        _redirect(self)
        try:
            super().start(command, shell, env, timeout)
        except LOST as error:
            transport, deadline = self.context.transport, Deadline(START_DEADLINE_S)
            raise channel_error(transport, "does not start commands", error, deadline) from None

    def send_start_message(self, command: str) -> None:
        """Start the command under the wrapper. Not with a terminal, whose end ends its processes."""
        if not self.using_pty:
            wrapped = build_wrapped_command(
                ("sh", "-c", _LOGIN_SHELL, "fabric", command), deadline_s=self.opts["timeout"], is_users=True
            )
            self._marked = {stream: MarkedOutput(wrapped.token, max_bytes=0) for stream in self._num_left}
            assert self.channel
            request_exec(self.channel, wrapped.command_line.encode(), START_DEADLINE_S)
            self.channel.sendall(wrapped.script)  # before what the task may send
            return
        request_exec(self.channel, command.encode(errors="surrogateescape"), START_DEADLINE_S)

    def wait(self) -> None:
        """Wait for the end of the command, or of a thread of Fabric that failed, without polling."""
        while not (self.process_is_finished or self.has_dead_threads):
            self.channel.status_event.wait(0.5)

    def read_proc_stdout(self, num_bytes: int) -> bytes:
        """Return the next bytes of the command's standard output. b'' at the end."""
        return self._read(self.channel.recv, "stdout", num_bytes)

    def read_proc_stderr(self, num_bytes: int) -> bytes:
        """Return the next bytes of the command's standard error. b'' at the end."""
        return self._read(self.channel.recv_stderr, "stderr", num_bytes)

    def _read(self, receive: Callable[[int], bytes], stream: str, num_bytes: int) -> bytes:
        """Return the next bytes after the wrapper's token. Bytes above the limit are read and dropped."""
        while data := receive(num_bytes):
            if stream in self._marked:
                data = self._marked[stream].feed(data)
            num_left = self._num_left[stream]
            self._num_left[stream] -= len(data)
            if len(data) > num_left >= 0:
                notice = f"\n[more than {MAX_OUTPUT_BYTES} bytes: the rest was dropped]\n"
                return data[:num_left] + notice.encode()
            if data and num_left > 0:
                return data
        return b""

    def returncode(self) -> int:
        """Return the exit code. Raises UnreachableError when the connection was lost."""
        code, transport = self.channel.exit_status, self.channel.get_transport()
        if code < 0 and not self._was_killed and not transport.is_active():
            raise lost_connection_error(transport, " while a command ran")
        return int(code)

    @property
    def timed_out(self) -> bool:
        """Whether the command was ended. Fabric asks whether the thread that ends it has finished."""
        return self._was_killed

    def kill(self) -> None:
        """End the command and its process group on the node. Without the group's id, the node ends it."""
        self._was_killed = True
        if "stderr" in self._marked and (group := self._marked["stderr"].group):
            kill_group(self.context.transport, group)
        if self.channel:
            with contextlib.suppress(*LOST):
                self.channel.close()

    def stop(self) -> None:
        """End the command if it still runs, after Ctrl-C for example, and close the channel."""
        self.context._runners.discard(self)
        if self.channel and not self.process_is_finished:
            self.kill()
        with contextlib.suppress(*LOST):
            super().stop()


class FleetGroup(fabric.ThreadingGroup):  # type: ignore[misc]
    """A Fabric group of the nodes of a fleet, a context manager. GroupException has the results of all."""

    link: FleetLink

    def close(self) -> None:
        """End running commands on the nodes, and close all connections."""
        run_on_all({one.node.name: one for one in self}, lambda connection: connection.close())
        self.link.jumps.close()


def open_group(
    fleet: Fleet,
    *,
    directory: Path,
    connect_deadline_s: float,
    command_deadline_s: float | None,
    folder: Path | None = None,
    printed: Mapping[str, Mapping[str, TextIO]] | None = None,
) -> FleetGroup:
    """Return a group of the nodes of `fleet`, with the user's settings in `folder`. Raises InputError."""
    check_open_files(len(fleet.nodes))
    jumps = JumpHosts(KnownHosts.load(fleet_known_hosts_paths(fleet, directory)))
    link = FleetLink(jumps, connect_deadline_s, command_deadline_s)
    group: FleetGroup = FleetGroup.from_connections(
        FleetConnection(node, link, folder, (printed or {}).get(node.name, {})) for node in fleet.nodes
    )
    group.link = link
    return group
