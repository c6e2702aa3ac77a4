"""Fabric connections to the nodes of a fleet: csdctl's SSH sessions under Fabric's interface.

Fabric accepts every host key, keeps all output, and leaves a command that it gives up running on the
machine. Here the host keys are those that `csdctl trust` accepted, output is bounded, and a command that is
ended takes its process group along. Everything else is Fabric's own code.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TextIO

import fabric
import paramiko
from fabric.runners import Remote
from invoke.runners import Local

from csdctl.errors import RemoteCommandError
from csdctl.fleet.model import Fleet, Node
from csdctl.transport.commands import build_wrapped_command
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.many import check_open_files, fleet_known_hosts_paths, run_on_all
from csdctl.transport.session import MAX_OUTPUT_BYTES, START_S, Conversation, Deadline, Process, bounded
from csdctl.transport.ssh import JumpHosts, SshSession, connect
from csdctl.transport.strict_transport import LOST

SFTP_DEADLINE_S = 60.0
"""Maximum time without any byte of a file transfer."""
LOGIN_SHELL = 'exec "${SHELL:-/bin/sh}" -c "$1"'


class FleetConnection(fabric.Connection):  # type: ignore[misc]
    """A fabric.Connection to a node. `printed` are the streams `out` and `err` that its commands print to."""

    # Fabric stores an attribute that the class lacks as a key of its configuration.
    node: Node = None  # type: ignore[assignment]
    printed: Mapping[str, TextIO] = None  # type: ignore[assignment]
    session: SshSession = None  # type: ignore[assignment]
    _connect: Callable[[Node], SshSession] = None  # type: ignore[assignment]

    def __init__(
        self,
        node: Node,
        config: fabric.Config,
        connect_to: Callable[[Node], SshSession],
        printed: Mapping[str, TextIO],
    ) -> None:
        self._set(node=node, printed=printed, _connect=connect_to)
        super().__init__(node.address, user=node.user, port=node.port, config=config, gateway=False)

    def open(self) -> None:
        """Connect, unless connected. Raises UnreachableError, HostKeyError, AuthenticationError."""
        if not self.is_connected:
            self.session = self._connect(self.node)
            self.transport = self.session.transport
            self.transport.channel_timeout = START_S
            open_sftp = partial(paramiko.SFTPClient.from_transport, self.transport)
            self.client = SimpleNamespace(open_sftp=open_sftp, close=self.session.close)

    def close(self) -> None:
        """End running commands on the node, and close the connection."""
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


class _LocalRunner(Local):
    """A command of c.local, on the host."""

    def start(self, command: str, shell: str, env: dict[str, str]) -> None:
        _redirect(self)
        super().start(command, shell, env)


class _RemoteRunner(Remote):  # type: ignore[misc]
    """A command on a node, without a terminal. Its output is bounded. When it is ended, its processes end."""

    _conversation: Conversation | None = None
    _was_killed = False

    def should_use_pty(self, pty: bool, fallback: bool) -> bool:
        return False

    def start(self, command: str, shell: str, env: dict[str, str], timeout: float | None = None) -> None:
        _redirect(self)
        if env:
            variables = " ".join(f"{name}={value}" for name, value in sorted(env.items()))
            command = f"export {variables} && {command}"
        arguments = ("sh", "-c", LOGIN_SHELL, "fabric", command)
        wrapped = build_wrapped_command(arguments, deadline_s=self.opts["timeout"], is_users=True)
        self._num_left = {"stdout": MAX_OUTPUT_BYTES, "stderr": MAX_OUTPUT_BYTES}
        self._errors: SimpleQueue[bytes] = SimpleQueue()
        session: SshSession = self.context.session
        running = session.start(wrapped, Deadline(START_S), self._errors.put)
        if self._disowned:
            session.forget(running)
        else:
            self._conversation = Conversation(running, lambda: session.forget(running))

    @property
    def _process(self) -> Process:
        assert self._conversation
        return self._conversation.running.process

    @property
    def process_is_finished(self) -> bool:
        assert self._conversation
        return self._conversation.running.has_exited()

    def wait(self) -> None:
        while not (self.process_is_finished or self.has_dead_threads):
            with contextlib.suppress(TimeoutError):
                self._process.exit_code(0.5)

    def read_proc_stdout(self, num_bytes: int) -> bytes:
        return self._limit("stdout", lambda: self._process.read_stdout(threading.TIMEOUT_MAX))

    def read_proc_stderr(self, num_bytes: int) -> bytes:
        return self._limit("stderr", self._errors.get)

    def _limit(self, stream: str, read: Callable[[], bytes]) -> bytes:
        """Return the next bytes of an output. Bytes above the limit are read and dropped."""
        while data := read():
            num_left = self._num_left[stream]
            self._num_left[stream] -= len(data)
            if len(data) > num_left >= 0:
                notice = f"\n[more than {MAX_OUTPUT_BYTES} bytes: the rest was dropped]\n"
                return data[:num_left] + notice.encode()
            if num_left > 0:
                return data
        return b""

    def _write_proc_stdin(self, data: bytes) -> None:
        assert self._conversation
        self._conversation.send_bytes(data)

    def close_proc_stdin(self) -> None:
        self._process.close_stdin()

    def returncode(self) -> int:
        return self._process.exit_code(START_S)

    @property
    def timed_out(self) -> bool:
        return self._was_killed  # Fabric asks whether the thread that ends the command has finished

    def kill(self) -> None:
        self._was_killed = True
        self.stop()

    def stop(self) -> None:
        super().stop()
        if self._conversation:
            self._conversation.close()


class FleetGroup(fabric.ThreadingGroup):  # type: ignore[misc]
    """A Fabric group of the nodes of a fleet, a context manager. GroupException has the results of all."""

    jumps: JumpHosts

    def close(self) -> None:
        """End running commands on the nodes, and close all connections."""
        connections = {connection.node.name: connection for connection in self}
        run_on_all(connections, lambda connection: connection.close())
        self.jumps.close()


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
    config = fabric.Config(
        overrides={
            "load_ssh_configs": False,  # the fleet file has the addresses
            "gateway": None,
            "runners": {"remote": _RemoteRunner, "local": _LocalRunner},
            "run": {"in_stream": False},
            "timeouts": {"command": command_deadline_s},
        }
    )
    if folder:
        config.set_project_location(str(folder))
        config.load_project()
    connect_to = partial(connect, known_hosts=jumps, connect_deadline_s=connect_deadline_s)
    group: FleetGroup = FleetGroup.from_connections(
        FleetConnection(node, config.clone(), connect_to, (printed or {}).get(node.name, {}))
        for node in fleet.nodes
    )
    group.jumps = jumps
    return group
