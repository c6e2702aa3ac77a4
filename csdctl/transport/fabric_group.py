"""Fabric connections to the nodes of a fleet: csdctl's SSH sessions under Fabric's interface.

Fabric accepts every host key, keeps all output, and leaves a command that it gives up running on the
machine. Here the host keys are those that `csdctl trust` accepted, output is bounded, and a command that is
ended takes its process group with it. Commands run to their end, without a terminal.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fabric
import paramiko
from fabric.runners import Remote, Result
from invoke.exceptions import CommandTimedOut, UnexpectedExit, WatcherError

from csdctl.errors import DeadlineError, InputError, RemoteCommandError
from csdctl.fleet.model import Fleet, Node
from csdctl.transport.commands import build_wrapped_command
from csdctl.transport.many import Connections, OnTraffic, check_open_files
from csdctl.transport.session import KILL_DEADLINE_S, MAX_OUTPUT_BYTES, START_S, Deadline, Process, bounded
from csdctl.transport.ssh import SshSession
from csdctl.transport.strict_transport import LOST

SFTP_DEADLINE_S = 60.0
"""Maximum time without any byte of a file transfer."""
LOGIN_SHELL = 'exec "${SHELL:-/bin/sh}" -c "$1"'


class FleetConnection(fabric.Connection):  # type: ignore[misc]
    """A fabric.Connection to a node."""

    # Fabric stores an attribute that the class lacks as a key of its configuration.
    node: Node = None  # type: ignore[assignment]
    session: SshSession = None  # type: ignore[assignment]
    _connect: Callable[[Node], SshSession] = None  # type: ignore[assignment]

    def __init__(self, node: Node, config: fabric.Config, connect: Callable[[Node], SshSession]) -> None:
        self._set(node=node, _connect=connect)
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


class _RemoteRunner(Remote):  # type: ignore[misc]
    def should_use_pty(self, pty: bool, fallback: bool) -> bool:
        return False

    def run(self, command: str, **options: Any) -> Result:
        self._setup(command, {"replace_env": True, **options})
        if self._asynchronous or self._disowned:
            raise InputError("commands run to their end: `asynchronous` and `disown` are not supported")
        if self.opts["dry"]:
            return self.generate_result(**self.result_kwargs, stdout="", stderr="", exited=0)
        if self.env:
            variables = " ".join(f"{name}={value}" for name, value in sorted(self.env.items()))
            command = f"export {variables} && {command}"
        result = self._run_to_end(command)
        for name in ("out", "err"):
            if f"std{name}" not in self.opts["hide"]:
                self.write_our_output(self.streams[name], getattr(result, f"std{name}"))
        if not (result or self.opts["warn"]):
            raise UnexpectedExit(result)
        return result

    def _run_to_end(self, command: str) -> Result:
        timeout_s, session = self.opts["timeout"], self.context.session
        arguments = ("sh", "-c", LOGIN_SHELL, "fabric", command)
        wrapped = build_wrapped_command(arguments, deadline_s=timeout_s, is_users=True)
        prompts = bytearray()

        def answer(process: Process, data: bytes) -> None:
            prompts.extend(data[: MAX_OUTPUT_BYTES - len(prompts)])
            try:
                for watcher in self.watchers:
                    for response in watcher.submit(prompts.decode(errors="replace")):
                        process.write_stdin(response.encode(), KILL_DEADLINE_S)
            except (WatcherError, OSError):  # such as for a wrong password: let the command fail
                process.close_stdin()

        conversation = session.start(wrapped, Deadline(START_S), answer if self.watchers else None)
        try:
            deadline = Deadline(timeout_s or threading.TIMEOUT_MAX)
            done = conversation.run_to_end(None if self.watchers else b"", deadline)
        except DeadlineError:
            result = self.generate_result(**self.result_kwargs, stdout="", stderr="", exited=None)
            raise CommandTimedOut(result, timeout=timeout_s) from None
        stdout, stderr = (text.decode(self.encoding, errors="replace") for text in (done.stdout, done.stderr))
        if len(done.stdout) >= MAX_OUTPUT_BYTES:
            stdout += f"\n[more than {MAX_OUTPUT_BYTES} bytes: the rest was dropped]\n"
        return self.generate_result(**self.result_kwargs, stdout=stdout, stderr=stderr, exited=done.exit_code)


class FleetGroup(fabric.ThreadingGroup):  # type: ignore[misc]
    """A Fabric group of the nodes of a fleet, a context manager. GroupException has the results of all."""

    close: Callable[[], None]
    """Ends running commands on the nodes, and closes all connections."""


def open_group(
    fleet: Fleet,
    *,
    directory: Path,
    connect_deadline_s: float,
    command_deadline_s: float | None,
    folder: Path | None = None,
    on_traffic: OnTraffic = lambda sent: None,
) -> FleetGroup:
    """Return a group of the nodes of `fleet`, with the user's settings in `folder`. Raises InputError."""
    check_open_files(len(fleet.nodes))
    config = fabric.Config(
        overrides={
            "load_ssh_configs": False,  # the fleet file has the addresses
            "gateway": None,
            "runners": {"remote": _RemoteRunner},
            "run": {"in_stream": False},
            "timeouts": {"command": command_deadline_s},
        }
    )
    if folder:
        config.set_project_location(str(folder))
        config.load_project()
    connections = Connections(fleet, directory, on_traffic, connect_deadline_s)
    group: FleetGroup = FleetGroup.from_connections(
        FleetConnection(node, config.clone(), connections.connect) for node in fleet.nodes
    )
    group.close = connections.close
    return group
