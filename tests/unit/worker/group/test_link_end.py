"""The end of a link that waits for MPI: nothing that MPI has taken from its sockets is left lying."""

import socket
from collections import deque
from contextlib import closing
from typing import Any

import pytest

from csdctl.worker.group import link
from csdctl.worker.group.channel import NUMBER, Channel, Letter, LinkSettings
from csdctl.worker.group.shared_memory import share_vector
from csdctl.worker.protocol.json_codec import to_json

NUM_ELEMENTS = 100


class Request:
    """As Open MPI's: asked for, it looks at the sockets if it is not complete, and once more at itself."""

    def __init__(self, world: "ScriptedWorld", into: Any) -> None:
        self._world, self.into, self.is_complete = world, into, False

    def Test(self, num_looks: int = 1) -> bool:
        while num_looks and not self.is_complete:
            self._world.progress()
            num_looks -= 1
        return self.is_complete


class ScriptedWorld:
    """The hub's side of MPI, where messages are on the sockets after so many looks at them."""

    rank = 0

    def __init__(self) -> None:
        self.num_looks = 0
        self.coming: deque[tuple[int, int, bytes]] = deque()
        """When, tag and content of each."""
        self._receiving: dict[int, deque[Request]] = {}
        self._sending: list[Request] = []

    def start_receive(self, into: Any, tag: int) -> Request:
        request = Request(self, into)
        self._receiving.setdefault(tag, deque()).append(request)
        return request

    def start_send(self, content: Any, tag: int) -> Request:
        self._sending.append(Request(self, content))
        return self._sending[-1]

    def progress(self) -> None:
        self.num_looks += 1
        for sent in self._sending:
            sent.is_complete = True
        self._sending.clear()
        while self.coming and self.coming[0][0] <= self.num_looks:
            _, tag, content = self.coming.popleft()
            request = self._receiving[tag].popleft()
            request.into.cast("B")[:] = content
            request.is_complete = True


@pytest.mark.parametrize("kind", ["chunk", "message"])
@pytest.mark.parametrize("when", range(10))
def test_what_a_look_has_taken_from_the_sockets_is_passed_on_before_the_end_sleeps(
    monkeypatch: pytest.MonkeyPatch, when: int, kind: str
) -> None:
    """The sockets are not ready a second time for it: it would lie there until a timeout."""
    monkeypatch.setattr(link, "limit_memory", lambda *sizes: None)
    world, (ours, theirs) = ScriptedWorld(), socket.socketpair()
    with closing(Channel(theirs)) as hub, closing(ours):
        vector, total = share_vector(NUM_ELEMENTS)[1], share_vector(NUM_ELEMENTS)[1]
        hub.send_descriptors(vector, total)
        hub.send(Letter.OPEN, to_json(LinkSettings(((NUM_ELEMENTS, 0),), 1 << 20, True)).encode())
        end = link.HubEnd(world, Channel(ours), 1, ())  # type: ignore[arg-type]
        assert not end._look()
        begun = world.num_looks
        if kind == "chunk":
            world.coming.append((begun + when, end._tag, bytes(4 * NUM_ELEMENTS)))
        else:
            head = link._HEAD.pack(Letter.JOIN, NUMBER.size, 0) + NUMBER.pack(1)
            world.coming.append((begun + when, link.HEAD, head.ljust(link.HEAD_BYTES, b"\0")))
        end.pass_over(Letter.VALUES, b"")  # what leaves is looked at, too
        while end._look():
            end.channel.flush()
        if not world.coming:
            assert [letter for letter, _ in hub.take()] == [Letter.CHUNK if kind == "chunk" else Letter.JOIN]
