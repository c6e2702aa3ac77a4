"""Which messages a server may send, and how many that are of no use for a command; for one connection.

The server may be hostile: paramiko itself answers, ignores or signs whatever arrives, as often as it arrives.
"""

import os
import time
from enum import IntEnum
from typing import Protocol

import paramiko
from paramiko.common import MSG_NAMES

from csdctl.transport.packets import MAX_EARLY_PACKET_BYTES, GreedyPacketizer


class Kind(IntEnum):
    """Numbers of messages, RFC 4250 section 4.1; those of `OF_A_CHANNEL` begin with the channel's number."""

    SERVICE_ACCEPT = 6
    KEXINIT = 20
    OPEN = 90
    WINDOW_ADJUST = 93
    DATA = 94
    EXTENDED_DATA = 95
    CLOSE = 97
    REQUEST = 98


OF_KEY_EXCHANGE = range(20, 50)
OF_COMMANDS = range(80, 128)
OF_A_CHANNEL = range(91, 101)

MAX_IDLE_COST = 100_000.0
"""Allowed at once: a message costs 1, and 1 for each KiB. Receiving them takes some seconds of CPU time."""

IDLE_COST_PER_S = 1_000.0
"""Allowed for ever: about a hundredth of a CPU."""

KEY_EXCHANGE_COST = 250.0
"""For a key exchange that csdctl did not ask for: about 10 ms of CPU time. Data pays for it, 1 for each KiB,
in either direction: a server with a small RekeyLimit is honest."""

SMALL_WINDOW_BYTES = 1024

_HEADER_BYTES: dict[int, int] = {Kind.DATA: 8, Kind.EXTENDED_DATA: 12}


class Connection(Protocol):
    """What the rules ask about the connection."""

    packetizer: GreedyPacketizer
    channels_seen: dict[int, bool]
    """The numbers of all channels that csdctl has opened."""
    num_logins_requested: int

    def is_authenticated(self) -> bool:
        """Whether the login has succeeded."""

    def has_channel(self, number: int) -> bool:
        """Whether the channel is open."""


class ServerRules:
    """Refuses messages that no honest server sends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cost_left = MAX_IDLE_COST
        self._counted_s = time.monotonic()
        self._num_sent_before = 0
        self._num_useful = 0

    def check(self, kind: int, message: paramiko.Message) -> None:
        """Raise SshProtocolError for a message that the server may not send now."""
        connection, refuse = self._connection, self._connection.packetizer.refuse
        size, head = _measure(message)
        channel = int.from_bytes(head[:4], "big")
        if kind not in MSG_NAMES:
            refuse(f"sent a message of unknown kind {kind}")
        if kind in OF_KEY_EXCHANGE and size > MAX_EARLY_PACKET_BYTES:
            refuse(f"sent more than {MAX_EARLY_PACKET_BYTES} bytes in a message of a key exchange")
        if kind in OF_COMMANDS and not connection.is_authenticated():
            refuse(f"sent {_name(kind)} before the login")
        if kind == Kind.SERVICE_ACCEPT:  # paramiko signs a login for each
            if connection.num_logins_requested == 0:
                refuse(f"sent {_name(kind)} that nobody asked for")
            connection.num_logins_requested -= 1
        if kind in OF_A_CHANNEL and channel not in connection.channels_seen:
            refuse(f"sent {_name(kind)} for a channel that does not exist")
        if kind == Kind.WINDOW_ADJUST:
            is_of_use = int.from_bytes(head[4:], "big") >= SMALL_WINDOW_BYTES
        else:
            is_of_use = size > _HEADER_BYTES.get(kind, size) and connection.has_channel(channel)
        if is_of_use:
            self._num_useful += size
        else:
            self._charge(kind, size)

    def _charge(self, kind: int, size: int) -> None:
        is_unasked = kind == Kind.KEXINIT and not self._connection.packetizer.need_rekey()
        now_s, num_sent = time.monotonic(), self._connection.packetizer.meter.num_sent
        earned = (now_s - self._counted_s) * IDLE_COST_PER_S
        earned += (num_sent - self._num_sent_before + self._num_useful) / 1024
        self._cost_left = min(MAX_IDLE_COST, self._cost_left + earned)
        self._counted_s, self._num_sent_before, self._num_useful = now_s, num_sent, 0
        self._cost_left -= 1 + size // 1024 + (KEY_EXCHANGE_COST if is_unasked else 0)
        if self._cost_left < 0:
            self._connection.packetizer.refuse(f"sends too much that is of no use, at last {_name(kind)}")


def _measure(message: paramiko.Message) -> tuple[int, bytes]:
    """Return the size of `message` and its first 8 bytes, without a copy of it."""
    size = message.packet.seek(0, os.SEEK_END)
    message.rewind()
    head = message.packet.read(8)
    message.rewind()
    return size, head


def _name(kind: int) -> str:
    return f"a message of kind {kind} ({MSG_NAMES[kind].replace('--', '-')})"
