"""The rank's side before a link is connected."""

import contextlib
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

from csdctl.worker.group.channel import Channel, LinkLostError, is_of_same_user, socket_name
from csdctl.worker.group.values import decode_value

POLL_S = 0.1


@dataclass(frozen=True)
class LinkGreeting:
    """The first message of a link: its group, and its rank and size in MPI's world."""

    generation: int
    rank: int
    size: int


class Listener:
    """Accepts the links of one rank, one after another."""

    def __init__(self, run_id: str, rank: int, key: str = "") -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(socket_name(run_id, rank, key))
        self._socket.listen(4)

    def close(self) -> None:
        """Accept no more links."""
        self._socket.close()

    def accept_link(
        self, generation: int, is_over: Callable[[], bool]
    ) -> tuple[Channel, LinkGreeting] | None:
        """Return the link of group `generation`; None as soon as `is_over`.

        Processes of other users, and links of an earlier group, are refused.
        """
        while not is_over():
            if not select.select([self._socket], [], [], POLL_S)[0]:
                continue
            connection, _ = self._socket.accept()
            if not is_of_same_user(connection):
                connection.close()
                continue
            channel = Channel(connection)
            with contextlib.suppress(LinkLostError, ValueError, TypeError):
                greeting = LinkGreeting(**decode_value(channel.receive()[1]))
                if greeting.generation == generation:
                    return channel, greeting
            channel.close()
        return None
