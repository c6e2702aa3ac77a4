"""Connections through jump hosts: one per jump host, shared by all nodes behind it within a command.

A jump host's key is checked as strictly as a node's. When a jump host is down, every node behind it gets the
same error message.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import paramiko

from csdctl.errors import CsdctlError, JumpHostError, UnreachableError
from csdctl.fleet.model import Node
from csdctl.transport.meter import Meter
from csdctl.transport.process import Deadline
from csdctl.transport.session import bounded
from csdctl.transport.strict_transport import LOST, StrictTransport

MAX_CONNECTING = 32
"""Maximum number of nodes that connect through a jump host concurrently, limited by its CPU."""

CAUSE_S = 1.0
_PROHIBITED = 1
"""SSH_OPEN_ADMINISTRATIVELY_PROHIBITED, RFC 4254 section 5.1."""

OpenTransport = Callable[[Node, Deadline], StrictTransport]


class JumpHosts:
    """The open connections to jump hosts of one command. The caller closes it."""

    def __init__(self, open_transport: OpenTransport) -> None:
        self._open_transport = open_transport
        self._locks: defaultdict[Node, threading.Lock] = defaultdict(threading.Lock)
        self._slots: defaultdict[Node, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(MAX_CONNECTING)
        )
        self._transports: dict[Node, StrictTransport] = {}
        self._errors: dict[Node, CsdctlError] = {}
        self.opened: list[tuple[Node, Meter]] = []
        """Every connection that was started, to jump hosts and to nodes, including failed ones."""

    @contextlib.contextmanager
    def slot(self, node: Node, deadline: Deadline) -> Iterator[None]:
        """Wait for a slot to connect to `node` through its jump host."""
        assert node.jump
        slots = self._slots[node.jump]
        if not slots.acquire(timeout=deadline.left_s):
            raise _timed_out(node, node.jump, deadline)
        try:
            yield
        finally:
            slots.release()

    def open_channel(self, node: Node, deadline: Deadline) -> paramiko.Channel:
        """Open a channel from the jump host to the address of `node`, to be used as a socket.

        Raises JumpHostError for problems of the jump host, UnreachableError for problems of the node.
        """
        assert node.jump
        jump = node.jump
        transport = self._connected(node, jump, deadline)
        try:
            return transport.open_channel(
                "direct-tcpip", (node.address, node.port), ("127.0.0.1", 0), timeout=max(0.1, deadline.left_s)
            )
        except paramiko.ChannelException as error:
            if error.code == _PROHIBITED:
                raise JumpHostError(
                    f"jump host {jump.name} does not forward connections ({bounded(error.text)})",
                    node=node.name,
                    remedy=f"allow it in {jump.name}'s sshd_config: AllowTcpForwarding, PermitOpen",
                ) from None
            raise UnreachableError(
                f"{node.address} port {node.port} cannot be reached through {jump.name} "
                f"({bounded(error.text)})",
                node=node.name,
                remedy="check that the machine is on, its address and port, and the network behind it",
            ) from None
        except LOST:
            if deadline.left_s < 0.1:
                raise _timed_out(node, jump, deadline) from None
            violation = transport.packetizer.violation
            reason = f" (its SSH server {violation})" if violation else ""
            raise JumpHostError(
                f"the connection to jump host {jump.name} was lost{reason}", node=node.name
            ) from None

    def close(self) -> None:
        """Close the connections to all jump hosts, and with them the connections that they forward."""
        for transport in self._transports.values():
            transport.close()

    def _connected(self, node: Node, jump: Node, deadline: Deadline) -> StrictTransport:
        # Whoever connects to the jump host has the same deadline, and learns what is wrong with it.
        if not self._locks[jump].acquire(timeout=deadline.left_s + CAUSE_S):
            raise _timed_out(node, jump, deadline)
        try:
            if jump in self._errors:
                raise _behind(node, jump, self._errors[jump])
            if jump not in self._transports:
                try:
                    self._transports[jump] = self._open_transport(jump, deadline)
                except CsdctlError as error:
                    self._errors[jump] = error
                    raise _behind(node, jump, error) from None
            return self._transports[jump]
        finally:
            self._locks[jump].release()


@dataclass(frozen=True)
class Keepalive:
    """Interval of keepalive requests, and time without a reply until the connection is closed, in seconds."""

    interval_s: float
    dead_after_s: float


def watch_peer(transport: paramiko.Transport, keepalive: Keepalive) -> None:
    """Close `transport` when its peer does not reply for `keepalive.dead_after_s`.

    For connections through a jump host: TCP keepalive covers only the first hop.
    """
    requested_s: list[float] = []

    def request() -> None:
        with contextlib.suppress(*LOST):
            transport.global_request("keepalive@openssh.com", wait=True)
            requested_s.clear()

    def when_idle() -> None:
        if not requested_s:
            requested_s.append(time.monotonic())
            threading.Thread(target=request, daemon=True).start()
        elif time.monotonic() - requested_s[0] > keepalive.dead_after_s:
            # In a thread of its own: close() joins the thread that calls this function.
            threading.Thread(target=transport.close, daemon=True).start()

    # Transport.set_keepalive sends requests but never checks for replies; hence paramiko's internal hook.
    transport.packetizer.set_keepalive(keepalive.interval_s, when_idle)


def _behind(node: Node, jump: Node, error: CsdctlError) -> CsdctlError:
    inner = error.message if isinstance(error, JumpHostError) else f"jump host {jump.name}: {error.message}"
    return JumpHostError(inner, node=node.name, remedy=error.remedy)


def _timed_out(node: Node, jump: Node, deadline: Deadline) -> JumpHostError:
    return JumpHostError(
        f"jump host {jump.name} did not connect to {node.address} port {node.port} "
        f"within {deadline.seconds:g} s",
        node=node.name,
        remedy=f"check that the machine is on, and the load of {jump.name}",
    )
