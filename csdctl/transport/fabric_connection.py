"""Fabric's Connection over csdctl's own SSH: the node's address, host key and jump host come from the fleet.

Fabric accepts every host key, polls a hundred times a second, waits without a limit, and leaves a command
that it gives up running on the machine. Here host keys are those that `csdctl trust` accepted, waits end by
events, and a command that is ended takes its process group with it. Whatever else tasks do with a
Connection is Fabric's own code.

Needs the extra `fabric`; imported only when Fabric is used.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import fabric
import paramiko
from fabric.runners import Remote
from invoke.runners import Local

from csdctl.errors import CsdctlError, DeadlineError, RemoteCommandError
from csdctl.fleet.model import Node
from csdctl.transport.commands import MarkedOutput, build_wrapped_command
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.process import Deadline
from csdctl.transport.session import MAX_OUTPUT_BYTES
from csdctl.transport.ssh import kill_group
from csdctl.transport.ssh_connect import lost_connection_error, make_jump_hosts, open_transport
from csdctl.transport.strict_transport import LOST, StrictTransport, request_exec

START_DEADLINE_S = 30.0
SFTP_DEADLINE_S = 60.0
"""Without any byte."""

_WAKE_S = 0.5
_KILL_WAIT_S = 1.0
_LOGIN_SHELL = 'exec "${SHELL:-/bin/sh}" -c "$1"'


class FleetLink:
    """What the connections of a fleet share: host keys, connections to jump hosts, deadlines."""

    def __init__(
        self, known_hosts: Iterable[Path], *, connect_deadline_s: float, command_deadline_s: float | None
    ) -> None:
        self.known_hosts = KnownHosts.load(known_hosts)
        self.jumps = make_jump_hosts(self.known_hosts)
        self.connect_deadline_s = connect_deadline_s
        self.command_deadline_s = command_deadline_s

    def open(self, node: Node) -> StrictTransport:
        """Return an authenticated connection; raises UnreachableError, HostKeyError, AuthenticationError."""
        return open_transport(node, self.known_hosts, Deadline(self.connect_deadline_s), self.jumps)

    def close(self) -> None:
        """Close the connections to jump hosts."""
        self.jumps.close()


class _Client:
    """What Fabric uses of paramiko's SSHClient."""

    def __init__(self, name: str, transport: StrictTransport) -> None:
        self._name = name
        self._transport = transport

    def get_transport(self) -> StrictTransport:
        return self._transport

    def open_sftp(self) -> paramiko.SFTPClient:
        try:
            client = paramiko.SFTPClient.from_transport(self._transport)
        except LOST as error:
            raise RemoteCommandError(
                f"its SSH server offers no SFTP, which `put` and `get` need ({error})",
                node=self._name,
                remedy="add `Subsystem sftp internal-sftp` to its sshd_config, or use csdctl deploy",
            ) from None
        assert client
        client.get_channel().settimeout(SFTP_DEADLINE_S)  # type: ignore[union-attr]
        return client

    def close(self) -> None:
        self._transport.close()


class FleetConnection(fabric.Connection):  # type: ignore[misc]
    """A fabric.Connection to a node of a fleet; `node` is what the fleet file has about it."""

    # Fabric keeps what is no attribute of the class as a key of its configuration.
    node: Node = None  # type: ignore[assignment]
    printed: Mapping[str, TextIO] = None  # type: ignore[assignment]
    """Where its commands print, `out` and `err`; without them, where Python prints."""
    _link: FleetLink = None  # type: ignore[assignment]
    _runners: "set[FleetRemote]" = None  # type: ignore[assignment]

    def __init__(
        self, node: Node, link: FleetLink, config: fabric.Config, printed: Mapping[str, TextIO]
    ) -> None:
        self._set(node=node, printed=printed, _link=link, _runners=set())
        super().__init__(
            node.address,
            user=node.user,
            port=node.port,
            config=config,
            gateway=False,
            connect_timeout=max(1, int(link.connect_deadline_s)),
        )

    def open(self) -> None:
        """Connect, unless connected; raises csdctl's errors."""
        if not self.is_connected:
            self.transport = self._link.open(self.node)
            self.client = _Client(self.node.name, self.transport)

    def close(self) -> None:
        """End what runs on the node, and close the connection."""
        for runner in list(self._runners):
            runner.kill()
        with contextlib.suppress(*LOST):
            super().close()

    def get(self, remote: Any, local: Any = None, **options: Any) -> Any:
        """Do what Fabric's `get` does; `{host}` in a local path is the name of the node."""
        if isinstance(local, str):  # nodes behind different jump hosts may have the same address
            local = local.replace("{host}", self.node.name)
        return super().get(remote, local, **options)

    def __repr__(self) -> str:
        return f"<Connection {self.node.name} host={self.host}>"

    def _identity(self) -> tuple[Any, ...]:
        return (self.node.name, *super()._identity())


def build_config(link: FleetLink, folder: Path | None = None) -> fabric.Config:
    """Return Fabric's configuration, with that of the user and of `folder`.

    ssh_config files are not read: the fleet file has the addresses, as `csdctl discover` resolved them.
    """
    overrides = {
        "load_ssh_configs": False,
        "gateway": None,
        "runners": {"remote": FleetRemote, "local": FleetLocal},
        "run": {"in_stream": False},
        "timeouts": {"command": link.command_deadline_s},
    }
    config = fabric.Config(overrides=overrides)
    if folder:
        config.set_project_location(str(folder))
        config.load_project()
    return config


def _redirect(runner: Any) -> None:
    """Let a command print where its connection says, unless the task names a stream.

    As `out_stream` of c.run, the stream would also get what the task hides.
    """
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
    """A command of a Connection: bounded output, and nothing is left behind when it is ended."""

    channel: paramiko.Channel | None = None
    _was_ended = False

    def start(self, command: str, shell: str, env: dict[str, str], timeout: float | None = None) -> None:
        """Start `command` in the login shell of the node's user."""
        self._stdout: MarkedOutput | None = None
        self._stderr: MarkedOutput | None = None
        self._left = {"stdout": MAX_OUTPUT_BYTES, "stderr": MAX_OUTPUT_BYTES}
        self.context._runners.add(self)
        _redirect(self)
        super().start(command, shell, env, timeout)

    def send_start_message(self, command: str) -> None:
        """Start it under the wrapper; with a terminal as it is: closing that ends its processes."""
        deadline = Deadline(START_DEADLINE_S)
        line = command
        if not self.using_pty:
            wrapped = build_wrapped_command(
                ("sh", "-c", _LOGIN_SHELL, "fabric", command), deadline_s=self.opts["timeout"], is_users=True
            )
            line = wrapped.command_line
            self._stdout = MarkedOutput(wrapped.token, max_bytes=0)
            self._stderr = MarkedOutput(wrapped.token, max_bytes=0)
        try:
            request_exec(self.channel, line.encode(errors="surrogateescape"), deadline.left_s)
        except LOST as error:
            raise self._lost(f"its SSH server does not start commands ({error})") from None

    def wait(self) -> None:
        """Wait for the end, or for a thread of Fabric that failed, by an event."""
        assert self.channel
        while not (self.process_is_finished or self.has_dead_threads):
            self.channel.status_event.wait(_WAKE_S)

    def read_proc_stdout(self, num_bytes: int) -> bytes:
        """Return the next bytes of the command; b'' at the end."""
        assert self.channel
        return self._read(self.channel.recv, self._stdout, "stdout", num_bytes)

    def read_proc_stderr(self, num_bytes: int) -> bytes:
        """Return the next bytes of the command's standard error; b'' at the end."""
        assert self.channel
        return self._read(self.channel.recv_stderr, self._stderr, "stderr", num_bytes)

    def returncode(self) -> int:
        """Return the exit code; raises UnreachableError when the connection was lost."""
        assert self.channel
        code = self.channel.exit_status
        if code < 0 and not self.timed_out and not self.context.transport.is_active():
            raise lost_connection_error(
                self.context.node.name, self.context.transport, " while a command ran"
            )
        return int(code)

    @property
    def timed_out(self) -> bool:
        """Whether the command was ended; Fabric asks whether the thread that ends it is through."""
        return self._was_ended

    def send_interrupt(self, interrupt: BaseException) -> None:
        """End the command on Ctrl-C."""
        if not self.using_pty:
            self.kill()
        super().send_interrupt(interrupt)

    def kill(self) -> None:
        """End the command and its process group on the node."""
        self._was_ended = True
        node, transport = self.context.node.name, self.context.transport
        if self._stderr and self.channel:
            deadline = Deadline(_KILL_WAIT_S)
            while not self._stderr.has_started and not self.process_is_finished and not deadline.has_passed:
                self.channel.status_event.wait(0.02)  # the group's id arrives when it starts
            if self._stderr.group and not self.process_is_finished:
                with contextlib.suppress(CsdctlError):
                    kill_group(node, transport, self._stderr.group)
        with contextlib.suppress(*LOST):
            super().kill()

    def stop(self) -> None:
        """Close the channel."""
        self.context._runners.discard(self)
        with contextlib.suppress(*LOST):
            super().stop()

    def _read(
        self,
        receive: Callable[[int], bytes],
        marked: MarkedOutput | None,
        stream: str,
        num_bytes: int,
    ) -> bytes:
        """Return the next bytes after the wrapper's token; what exceeds the limit is read and dropped."""
        while data := receive(num_bytes):
            if marked:
                data = marked.feed(data)
            kept = data[: max(0, self._left[stream])]
            is_first_drop = self._left[stream] >= 0 and len(kept) < len(data)
            self._left[stream] -= len(data)
            if is_first_drop:
                kept += f"\n[more than {MAX_OUTPUT_BYTES} bytes: the rest was dropped]\n".encode()
            if kept:
                return kept
        return b""

    def _lost(self, problem: str) -> CsdctlError:
        node, transport = self.context.node.name, self.context.transport
        if not transport.is_active():
            return lost_connection_error(node, transport)
        return RemoteCommandError(problem, node=node, remedy="check MaxSessions and ForceCommand there")


def timed_out_error(name: str, command: str, timeout_s: float) -> DeadlineError:
    """Return the error for a command of a task that was ended at its deadline."""
    return DeadlineError(
        f"`{command[:80]}` did not finish within {timeout_s:g} s; it was ended",
        node=name,
        remedy="raise --timeout, or give `timeout=` to this c.run",
    )
