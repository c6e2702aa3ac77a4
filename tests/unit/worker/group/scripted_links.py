"""A real hub with links that do what a test says: each link is a socket of the test, without MPI."""

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from csdctl.worker.group.channel import NUMBER, Channel, Letter, LinkSettings
from csdctl.worker.group.chunks import CHUNK_SIZE, divide
from csdctl.worker.group.communicator import HubCommunicator, HubProcess
from csdctl.worker.group.hub import HubSettings
from csdctl.worker.group.shared_memory import map_array
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.sandbox import hub_address
from tests.linked_ranks import HUB_COMMAND, SAMPLES, make_vector

SIZE = CHUNK_SIZE + 30
"""Two chunks."""


class ScriptedLink:
    """The link of one rank."""

    def __init__(self, run_id: str, rank: int) -> None:
        self.rank = rank
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect("\0" + hub_address(run_id, rank, "key"))
        self.connection, self.channel = connection, Channel(connection)
        vector, total = self.channel.receive_descriptors(2)
        self.vector, self._total = map_array(vector), map_array_read_only(total)
        letter, content = self.channel.receive()
        assert letter == Letter.OPEN
        self.settings = from_json(LinkSettings, content.decode())
        self.channel.max_bytes = 1 << 28
        self.received = np.zeros(len(self.vector), np.float32)
        """The sum as the rank has it."""
        self._place, self.has_again = 0, False
        """The next chunk of the sum. Whether any sum has been sent again."""

    def send(self, letter: bytes, content: bytes = b"") -> None:
        self.channel.send(letter, content)

    def join(self) -> None:
        self.send(Letter.JOIN, NUMBER.pack(self.rank) + b"hash")

    def send_parts(self, vector: Any, numbers: Iterable[int] = (0, 1)) -> None:
        """Let chunks of a vector arrive at the hub."""
        for number in numbers:
            chunk = divide(len(vector))[number].elements
            self.vector[chunk] = vector[chunk]
            self.send(Letter.CHUNK)

    def await_letter(self, awaited: bytes, size: int = SIZE) -> bytes:
        """Take what the hub sends until a message with this letter. Return its content."""
        letter = b""
        while letter != awaited:
            letter, content = self.channel.receive()
            if letter == Letter.CHUNK:
                self._take_chunk(size)
        return bytes(content)

    def await_sum(self, size: int = SIZE) -> bytes:
        """Take the chunks of a sum until the last one. Return the verdict."""
        verdict, is_again = b"", False
        while True:
            letter, content = self.channel.receive()
            if letter == Letter.AGAIN:
                is_again = self.has_again = True
            elif letter == Letter.TOTAL:
                verdict = bytes(content)
            elif letter == Letter.CHUNK and self._take_chunk(size):
                if not is_again:
                    return verdict
                is_again = False

    def _take_chunk(self, size: int) -> bool:
        """Take the next chunk of a sum. Return whether it is the last one."""
        chunks = divide(size)
        elements = chunks[self._place].elements
        self.received[elements] = self._total[elements]
        self._place = (self._place + 1) % len(chunks)
        return self._place == 0

    def close(self) -> None:
        self.connection.close()


def map_array_read_only(descriptor: int) -> Any:
    """Return the vector behind a descriptor that cannot write."""
    from csdctl.worker.group.shared_memory import map_view

    return np.frombuffer(map_view(descriptor, is_read_only=True), np.float32)


class ScriptedGroup:
    """Rank 0, whose calls run in a thread, its hub, and scripted links."""

    def __init__(self, servers: Sequence[int] = (0, 0, 0, 0), sizes: Sequence[int] = (SIZE,)) -> None:
        self.run_id = f"scripted-{time.monotonic_ns()}"
        self.servers = servers
        settings = HubSettings(
            self.run_id, 0, "key", "", tuple(servers), tuple((size, 0) for size in sizes), 1 << 16
        )
        self.host = HubCommunicator(HubProcess(HUB_COMMAND), settings, lambda missing: None)
        self.links: dict[int, ScriptedLink] = {}
        self._thread = ThreadPoolExecutor(1)

    def connect(self, rank: int) -> ScriptedLink:
        """Return the link of a rank, which has joined."""
        self.links[rank] = ScriptedLink(self.run_id, rank)
        self.links[rank].join()
        while rank not in self.host.joining:
            self.host.await_joining()
        return self.links[rank]

    def begin(self, ranks: Iterable[int]) -> list[ScriptedLink]:
        """Return the links of ranks, which take part."""
        links = [self.connect(rank) for rank in ranks]
        self.host.admit([link.rank for link in links])
        self.host.gather(None, type(None))
        return links

    def later(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> "Future[Any]":
        return self._thread.submit(function, *arguments, **options)

    def make(self, rank: int, seed: int = 1, size: int = SIZE) -> Any:
        """Return a vector of a rank."""
        return make_vector(seed, rank, len(self.servers), size)

    def sum(self, seed: int = 1, size: int = SIZE) -> "Future[Any]":
        """Let rank 0 sum. Return the copy of the sum that it gets."""
        counts = {rank: float(SAMPLES) for rank in self.host.members}

        def sum_up() -> Any:
            self.host.local[:size] = self.make(0, seed, size)
            return self.host.sum(self.host.local, counts, checks_finite=True)[:size].copy()

        return self.later(sum_up)

    def end(self) -> None:
        self.host._hub.process.kill()  # a sum that waits ends
        self._thread.shutdown()
        for link in self.links.values():
            link.close()
        self.host.disconnect()
