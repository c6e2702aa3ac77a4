"""A node as a session: commands and files over one SSH connection.

Commands run under the shell script of `commands`. Files go through the standard input of a command instead of
SFTP (`shipping.deliver`), so servers without SFTP (dropbear) work.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import paramiko

from csdctl.errors import CsdctlError, DeadlineError, RemoteCommandError, UnreachableError
from csdctl.fleet.model import Node
from csdctl.transport.commands import WrappedCommand, build_kill_command_line
from csdctl.transport.known_hosts import KnownHosts, fingerprint
from csdctl.transport.session import Deadline, Running, Session, bounded
from csdctl.transport.ssh_connect import (
    JumpHosts,
    lost_connection_error,
    open_transport,
)
from csdctl.transport.strict_transport import LOST, StrictTransport, request_exec

MAX_CHANNELS = 8
"""Concurrent commands on one connection: sshd allows 10 (MaxSessions), one is reserved for kills."""

KILL_DEADLINE_S = 5.0

_READ_BYTES = 1 << 16
_MAX_READ_AT_ONCE_BYTES = 1 << 22  # more than the window of a channel
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
        self._starting = threading.Condition()
        self._num_starting = 0
        self._is_closed = False

    def close(self) -> None:
        """End running commands on the node and close the connection.

        A command that another thread is starting is waited for, and ended too: its server may already run it.
        """
        with self._starting:
            self._is_closed = True
            self._starting.wait_for(lambda: self._num_starting == 0, KILL_DEADLINE_S)
        for running in list(self._running):
            with contextlib.suppress(CsdctlError):
                running.kill()
        self._transport.close()

    def _start(self, wrapped: WrappedCommand, deadline: Deadline) -> Running:
        command_line = wrapped.command_line
        if not self._free_channels.acquire(timeout=deadline.left_s):
            raise DeadlineError(
                f"`{wrapped.command[0]}` could not start within {deadline.seconds:g} s: "
                f"{MAX_CHANNELS} commands are running there already",
                node=self.name,
            )
        try:
            with self._counted_as_starting():
                channel = _open_channel(self.name, self._transport, command_line, deadline)
                running = Running(self.name, wrapped, ChannelProcess(self.name, self._transport, channel))
                self._running.add(running)
        except BaseException:
            self._free_channels.release()
            raise
        return running

    @contextlib.contextmanager
    def _counted_as_starting(self) -> Iterator[None]:
        """Let `close` wait for the block; raises UnreachableError when the session is closed."""
        with self._starting:
            if self._is_closed:
                raise UnreachableError("the connection was closed", node=self.name)
            self._num_starting += 1
        try:
            yield
        finally:
            with self._starting:
                self._num_starting -= 1
                self._starting.notify_all()

    def _forget(self, running: Running) -> None:
        super()._forget(running)
        self._free_channels.release()


class _ForwardingEvent(threading.Event):
    """An event that also sets another event."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def set(self) -> None:
        super().set()
        self._other.set()


class ChannelProcess:
    """A command at the other end of an SSH channel; implements `session.Process`.

    Waits for either stream or the exit without polling, which paramiko's documented interface cannot do:
    hence the undocumented attributes `in_buffer`, `in_stderr_buffer`, `status_event` and `eof_received` of
    Channel.
    """

    def __init__(self, name: str, transport: StrictTransport, channel: paramiko.Channel) -> None:
        self._name = name
        self._transport = transport
        self._channel = channel
        self._channel.settimeout(_SEND_POLL_S)  # applies to sending only
        self._take_stderr: Callable[[bytes], object] = lambda data: None
        self._stderr_lock = threading.Lock()
        self._activity = threading.Event()
        for pipe in (channel.in_buffer, channel.in_stderr_buffer):
            pipe.set_event(self._activity)
        channel.status_event = _ForwardingEvent(self._activity)
        if channel.closed or channel.exit_status >= 0:
            channel.status_event.set()

    def read_stdout(self, timeout_s: float, *, wakes_at_exit: bool = False) -> bytes:
        """Return the next bytes, b'' at the end; raises TimeoutError. Reads standard error meanwhile."""
        deadline, had_ended = Deadline(timeout_s), self._channel.status_event.is_set()
        while True:
            self._activity.clear()
            self._drain_stderr()
            if self._channel.in_buffer.read_ready() or self._is_at_end():
                with contextlib.suppress(*LOST):
                    return self._channel.recv(_READ_BYTES)
                return b""  # the connection is lost; `exit_code` reports it
            has_just_ended = wakes_at_exit and not had_ended and self._channel.status_event.is_set()
            if has_just_ended or not self._activity.wait(deadline.left_s) or deadline.has_passed:
                raise TimeoutError

    def start_stderr(self, take: Callable[[bytes], object]) -> None:
        """Pass standard error to `take`, in the thread that waits for the command."""
        self._take_stderr = take

    def finish_stderr(self, timeout_s: float) -> None:
        """Pass the rest of standard error to `take`; wait for its end at most `timeout_s`."""
        deadline = Deadline(timeout_s)
        while True:
            self._activity.clear()
            is_at_end = self._is_at_end()
            self._drain_stderr()
            if is_at_end or not self._activity.wait(deadline.left_s) or deadline.has_passed:
                break
        self._activity.set()  # another thread may wait for the event that was just cleared

    def _is_at_end(self) -> bool:
        return bool(self._channel.eof_received or self._channel.closed)

    def _drain_stderr(self) -> None:
        num_left = _MAX_READ_AT_ONCE_BYTES  # a server that sends without pause must not hold the caller here
        with self._stderr_lock, contextlib.suppress(*LOST):
            while num_left > 0 and self._channel.in_stderr_buffer.read_ready():
                data = self._channel.recv_stderr(_READ_BYTES)
                num_left -= len(data)
                self._take_stderr(data)
        if num_left <= 0:
            self._activity.set()

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
