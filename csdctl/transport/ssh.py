"""A node as a session: commands and files over one SSH connection.

Commands run under the shell script of `commands`. Files go through the standard input of a command instead of
SFTP (`shipping.deliver`), so servers without SFTP (dropbear) work.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import paramiko

from csdctl.errors import CsdctlError, DeadlineError, RemoteCommandError
from csdctl.fleet.model import Node
from csdctl.transport.commands import WrappedCommand, build_kill_command_line
from csdctl.transport.known_hosts import KnownHosts, fingerprint
from csdctl.transport.session import KILL_DEADLINE_S, Deadline, Running, Session, bounded
from csdctl.transport.ssh_connect import (
    JumpHosts,
    lost_connection_error,
    open_transport,
)
from csdctl.transport.strict_transport import LOST, StrictTransport, request_exec

MAX_CHANNELS = 8
"""Concurrent commands on one connection: sshd allows 10 (MaxSessions), one is reserved for kills."""

_READ_BYTES = 1 << 16
_GOING_DOWN_S = 0.5
_MAX_QUEUE_S = 10.0
_SEND_POLL_S = 0.5


def connect(
    node: Node, known_hosts: JumpHosts | Iterable[Path], *, connect_deadline_s: float = 10.0
) -> "SshSession":
    """Open a session to `node`.

    `known_hosts` are files, or the connections to jump hosts that it shares with other nodes.
    Raises UnreachableError, HostKeyError or AuthenticationError within the deadline.
    """
    jumps = known_hosts if isinstance(known_hosts, JumpHosts) else JumpHosts(KnownHosts.load(known_hosts))
    return SshSession(node, open_transport(node, Deadline(connect_deadline_s), jumps))


class SshSession(Session):
    """The session of a node, over one SSH connection."""

    def __init__(self, node: Node, transport: StrictTransport) -> None:
        key = fingerprint(transport.get_remote_server_key().asbytes())
        super().__init__(node.name, transport.packetizer.meter, key)
        self._transport = transport
        self._free_channels = threading.BoundedSemaphore(MAX_CHANNELS)

    def close(self) -> None:
        """End running commands on the node and close the connection."""
        super().close()
        self._transport.close()

    def _start(self, wrapped: WrappedCommand, deadline: Deadline) -> Running:
        if not self._free_channels.acquire(timeout=deadline.left_s):
            raise DeadlineError(
                f"`{wrapped.command[0]}` could not start within {deadline.seconds:g} s: "
                f"{MAX_CHANNELS} commands are running there already",
                node=self.name,
            )
        try:
            return super()._start(wrapped, deadline)
        except BaseException:
            self._free_channels.release()
            raise

    def _start_process(self, wrapped: WrappedCommand, deadline: Deadline) -> "ChannelProcess":
        channel = _open_channel(self.name, self._transport, wrapped.command_line, deadline)
        return ChannelProcess(self.name, self._transport, channel)

    def _forget(self, running: Running) -> None:
        super()._forget(running)
        self._free_channels.release()


class ChannelProcess:
    """A command at the other end of an SSH channel; implements `session.Process`.

    Waits for each stream and for the exit without polling, which paramiko's documented interface cannot do:
    hence the undocumented attributes `in_buffer`, `in_stderr_buffer` and `status_event` of Channel.
    """

    def __init__(self, name: str, transport: StrictTransport, channel: paramiko.Channel) -> None:
        self._name = name
        self._transport = transport
        self._channel = channel
        self._channel.settimeout(_SEND_POLL_S)  # applies to sending only
        self._has_stdout, self._has_stderr = threading.Event(), threading.Event()
        channel.in_buffer.set_event(self._has_stdout)
        channel.in_stderr_buffer.set_event(self._has_stderr)

    def read_stdout(self, timeout_s: float) -> bytes:
        """Return the next bytes, b'' at the end; raises TimeoutError."""
        if not self._has_stdout.wait(timeout_s):
            raise TimeoutError
        return _receive(self._channel.recv)

    def read_stderr(self) -> bytes:
        """Wait for the next bytes of standard error and return them, b'' at the end."""
        self._has_stderr.wait()
        return _receive(self._channel.recv_stderr)

    def write_stdin(self, data: bytes, timeout_s: float) -> None:
        """Write all of `data`; raises TimeoutError, or OSError when the channel is closed."""
        deadline, rest = Deadline(timeout_s), data
        while rest:
            try:
                num_sent = self._channel.send(rest)
            except TimeoutError:
                if deadline.has_passed:
                    raise
                continue
            except (paramiko.SSHException, EOFError):  # what paramiko raises for a lost connection
                raise BrokenPipeError("the connection is closed") from None
            if num_sent == 0:
                raise BrokenPipeError("the channel is closed")
            rest = rest[num_sent:]

    def close_stdin(self) -> None:
        """Signal the end of input to the command."""
        with contextlib.suppress(*LOST):
            self._channel.shutdown_write()

    def exit_code(self, timeout_s: float) -> int:
        """Wait for the end; raises TimeoutError, or UnreachableError when the connection was lost."""
        if not self._channel.status_event.wait(timeout_s):
            raise TimeoutError
        code = self._channel.exit_status
        if code >= 0:
            return min(code, 255)
        # No code: a signal ended the command, or the connection is being lost, and then its thread ends.
        self._transport.join(_GOING_DOWN_S)
        if self._transport.is_active():
            return 255
        raise lost_connection_error(self._name, self._transport, " while a command ran")

    def kill_group(self, group: int) -> bool:
        """End process group `group` on the node, over a separate channel."""
        return kill_group(self._name, self._transport, group)

    def release(self) -> None:
        """Close the channel."""
        _close(self._channel)


def _receive(receive: Callable[[int], bytes]) -> bytes:
    try:
        return receive(_READ_BYTES)
    except TimeoutError:  # another thread has taken what was there
        raise
    except LOST:  # `exit_code` reports it
        return b""


def kill_group(name: str, transport: StrictTransport, group: int) -> bool:
    """End process group `group` on node `name`, over a channel of its own; return whether that worked."""
    deadline = Deadline(KILL_DEADLINE_S)
    try:
        channel = _open_channel(name, transport, build_kill_command_line(group), deadline)
    except CsdctlError:
        return False
    try:
        return channel.status_event.wait(deadline.left_s)
    finally:
        _close(channel)


def _open_channel(
    name: str, transport: StrictTransport, command_line: str, deadline: Deadline
) -> paramiko.Channel:
    """Open a channel and start `command_line` on it; waits while the server has too many channels."""
    queue_deadline = Deadline(min(_MAX_QUEUE_S, deadline.left_s))
    pause_s = 0.05
    while True:
        try:
            channel = transport.open_session(timeout=max(0.1, deadline.left_s))
            break
        except LOST as error:
            if not transport.is_active() or queue_deadline.left_s < pause_s:
                raise channel_error(name, transport, "does not open more channels", error, deadline) from None
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)
    try:
        request_exec(channel, command_line.encode(errors="surrogateescape"), max(0.1, deadline.left_s))
    except LOST as error:
        _close(channel)
        raise channel_error(name, transport, "does not start commands", error, deadline) from None
    return channel


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(*LOST):
        channel.close()


def channel_error(
    name: str, transport: StrictTransport, what: str, error: Exception, deadline: Deadline
) -> CsdctlError:
    """Return why a command could not be started: what the server "does not", or no time was left."""
    if not transport.is_active():
        return lost_connection_error(name, transport)
    if deadline.left_s < 0.1:
        return DeadlineError(
            f"the SSH server did not start a command within {deadline.seconds:g} s", node=name
        )
    return RemoteCommandError(
        f"the SSH server {what} ({bounded(error)})",
        node=name,
        remedy="check MaxSessions and ForceCommand in its sshd_config",
    )
