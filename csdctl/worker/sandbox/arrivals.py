"""Connections that arrive at the sandbox's ports: members of the group get in, everybody else is closed.

Nothing that a stranger sends, or does not send, makes a member wait. The kernel reports a connection when its
token has arrived (TCP_DEFER_ACCEPT), so a token is never waited for in `accept`. Only when very many
connections are half open, the kernel reports all of them at once (SYN cookies): then a thread waits for the
token, and wakes the sandbox by a connection of its own.
"""

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from csdctl.worker.sandbox.addresses import IpNetwork, list_own_addresses, to_ip

TOKEN_S = 2.0
"""For the token of a connection, from when the peer connected."""
MAX_STRANGERS = 64
"""Closed in one call, which then reports that nobody is there; the kernel wakes the sandbox again."""
MAX_LATE = 256
"""Connections whose token is waited for; the oldest has to go."""
_RING_S = 1.0
_NONCE_BYTES, TOKEN_BYTES = 16, 32

Peer = tuple[socket.socket, Any]
"""A connection, and the address that it comes from."""


class Tokens:
    """The tokens of one run: random bytes, and their HMAC with the address that was connected to."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()

    def make(self, address: tuple[Any, ...]) -> bytes:
        """Return a token for a connection to `address`."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._sign(nonce, address)

    def is_valid(self, token: bytes, address: tuple[Any, ...]) -> bool:
        """Return whether a member has made `token` to connect to `address`; a token is valid once.

        So who has watched the network can use it neither here nor at another port or machine.
        """
        nonce = token[:_NONCE_BYTES]
        if not hmac.compare_digest(token[_NONCE_BYTES:], self._sign(nonce, address)):
            return False
        with self._lock:
            is_new = nonce not in self._seen
            self._seen.add(nonce)
        return is_new

    def _sign(self, nonce: bytes, address: tuple[Any, ...]) -> bytes:
        place = to_ip(address[0]).packed + address[1].to_bytes(2, "big")
        return hmac.digest(self._key, nonce + place, hashlib.sha256)[: TOKEN_BYTES - _NONCE_BYTES]


class Arrivals:
    """Accepts for the sandbox's listening sockets."""

    def __init__(self, tokens: Tokens, peers: Sequence[IpNetwork]) -> None:
        self._tokens = tokens
        self._peers = peers
        self._late: dict[tuple[Any, ...], deque[Peer]] = {}
        """Members whose token came late, by the address that they connected to."""
        self._waiting: deque[socket.socket] = deque()

    def accept(self, listening: socket.socket) -> Peer:
        """Return the next member's connection; raises OSError. It waits if the socket is set to."""
        late = self._late.setdefault(listening.getsockname(), deque())
        for number in itertools.count(1):
            with contextlib.suppress(IndexError):
                return late.popleft()
            if number > MAX_STRANGERS and not os.get_blocking(listening.fileno()):
                break
            accepted, peer = listening.accept()
            try:
                token = accepted.recv(TOKEN_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                arguments = accepted, peer, late, listening.getsockname()
                threading.Thread(target=self._await_token, args=arguments, daemon=True).start()
                continue
            except OSError:
                token = b""
            if self._tokens.is_valid(token, accepted.getsockname()):
                return accepted, peer
            accepted.close()
        raise BlockingIOError(errno.EAGAIN, "only strangers have connected")

    def _await_token(
        self, accepted: socket.socket, peer: Any, late: deque[Peer], listening: tuple[Any, ...]
    ) -> None:
        self._waiting.append(accepted)
        if len(self._waiting) > MAX_LATE:
            with contextlib.suppress(OSError, IndexError):
                self._waiting.popleft().shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
        token = b""
        with contextlib.suppress(OSError):
            accepted.settimeout(TOKEN_S)
            token = accepted.recv(TOKEN_BYTES)
        with contextlib.suppress(ValueError):
            self._waiting.remove(accepted)
        if self._tokens.is_valid(token, accepted.getsockname()):
            late.append((accepted, peer))
            self._ring(listening)
        else:
            accepted.close()

    def _ring(self, listening: tuple[Any, ...]) -> None:
        """Connect to the sandbox's port, so that it asks for connections again."""
        host, port, *_ = listening
        if to_ip(host).is_unspecified:
            version = ipaddress.ip_address(host).version
            own = [one for one in list_own_addresses() if one.version == version]
            peers = [peer for peer in self._peers if peer.version == version]
            # A filter may drop what comes from elsewhere (`close_to_others`).
            host = str(next((one for one in own if any(one in peer for peer in peers)), own[0]))
        # A queue that is full wakes the sandbox too.
        with contextlib.suppress(OSError), socket.create_connection((host, port), _RING_S) as ringing:
            ringing.sendall(b"\0")
