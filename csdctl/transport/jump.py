"""Ways through jump hosts: one connection to each, shared by all nodes behind it within a command.

A jump host's own key is checked as strictly as a node's. That one of them is down is one cause, said in the
same words for every node behind it.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import paramiko

from csdctl.errors import CsdctlError, JumpHostError, UnreachableError
from csdctl.fleet.model import Node
from csdctl.transport.meter import Meter
from csdctl.transport.orderly import OrderlyTransport
from csdctl.transport.process import Deadline

MAX_CONNECTING = 32
"""Nodes that connect through one jump host at a time: its processor does the work of all of them."""

_PROHIBITED = 1
"""SSH_OPEN_ADMINISTRATIVELY_PROHIBITED, RFC 4254 section 5.1."""

OpenTransport = Callable[[Node, Deadline], OrderlyTransport]


class JumpHosts:
    """The connections to jump hosts that one command has open. The caller closes it."""

    def __init__(self, open_transport: OpenTransport) -> None:
        self._open_transport = open_transport
        self._locks: defaultdict[Node, threading.Lock] = defaultdict(threading.Lock)
        self._turns: defaultdict[Node, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(MAX_CONNECTING)
        )
        self._transports: dict[Node, OrderlyTransport] = {}
        self._errors: dict[Node, CsdctlError] = {}
        self.opened: list[tuple[Node, Meter]] = []
        """Every connection that was begun, to jump hosts and to nodes, whatever became of it."""

    @contextlib.contextmanager
    def turn(self, node: Node, deadline: Deadline) -> Iterator[None]:
        """Wait for one of the places to connect to `node` through its jump host."""
        assert node.jump
        turns = self._turns[node.jump]
        if not turns.acquire(timeout=deadline.left_s):
            raise _too_slow(node, node.jump, deadline)
        try:
            yield
        finally:
            turns.release()

    def open_channel(self, node: Node, deadline: Deadline) -> paramiko.Channel:
        """A channel to the address of `node` from its jump host; as good as a socket.

        Raises JumpHostError for what is wrong with the jump host, UnreachableError for the node.
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
                    f"jump host {jump.name} forwards no connections ({error.text})",
                    node=node.name,
                    remedy=f"allow it in {jump.name}'s sshd_config: AllowTcpForwarding, PermitOpen",
                ) from None
            raise UnreachableError(
                f"{node.address} port {node.port} cannot be reached through {jump.name} ({error.text})",
                node=node.name,
                remedy="check that the machine is on, its address and port, and the network behind it",
            ) from None
        except (paramiko.SSHException, EOFError, OSError):
            if deadline.left_s < 0.1:
                raise _too_slow(node, jump, deadline) from None
            raise JumpHostError(f"the connection to jump host {jump.name} was lost", node=node.name) from None

    def close(self) -> None:
        """Close the connections to all jump hosts; what goes through them ends too."""
        for transport in self._transports.values():
            transport.close()

    def _connected(self, node: Node, jump: Node, deadline: Deadline) -> paramiko.Transport:
        with self._locks[jump]:
            if jump in self._errors:
                raise _behind(node, jump, self._errors[jump])
            if jump not in self._transports:
                try:
                    self._transports[jump] = self._open_transport(jump, deadline)
                except CsdctlError as error:
                    self._errors[jump] = error
                    raise _behind(node, jump, error) from None
            return self._transports[jump]


def watch_peer(transport: paramiko.Transport, interval_s: float, dead_after_s: float) -> None:
    """Close `transport` when its peer does not answer for `dead_after_s`.

    For connections without a socket of their own: TCP sees the first hop only.
    """
    asked_s: list[float] = []

    def ask() -> None:
        transport.global_request("keepalive@openssh.com", wait=True)
        asked_s.clear()

    def when_idle() -> None:
        if not asked_s:
            asked_s.append(time.monotonic())
            threading.Thread(target=ask, daemon=True).start()
        elif time.monotonic() - asked_s[0] > dead_after_s:
            threading.Thread(target=transport.close, daemon=True).start()  # not by its own thread

    transport.packetizer.set_keepalive(interval_s, when_idle)


def _behind(node: Node, jump: Node, error: CsdctlError) -> CsdctlError:
    inner = error.message if isinstance(error, JumpHostError) else f"jump host {jump.name}: {error.message}"
    return JumpHostError(inner, node=node.name, remedy=error.remedy)


def _too_slow(node: Node, jump: Node, deadline: Deadline) -> JumpHostError:
    return JumpHostError(
        f"jump host {jump.name} opened no way to {node.address} port {node.port} in {deadline.seconds:g} s",
        node=node.name,
        remedy=f"check that the machine is on, and the load of {jump.name}",
    )
