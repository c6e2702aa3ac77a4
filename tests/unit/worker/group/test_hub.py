"""The hub: what it adds and in which order, whom it counts, and its answer to a link that breaks a rule."""

import contextlib
import json
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.group import communicator
from csdctl.worker.group.channel import MAX_VALUE_BYTES, NUMBER, Channel, Letter
from csdctl.worker.group.communicator import NUM_KEPT, HubCommunicator, HubProcess
from csdctl.worker.group.hub import MAX_HELD_BYTES, HubSettings
from csdctl.worker.group.values import PeerFaultError, RankLostError, StepVoidError
from csdctl.worker.protocol.sandbox import link_address
from tests.linked_ranks import HUB_COMMAND, add
from tests.patience import eventually
from tests.unit.worker.group.scripted_links import SIZE, ScriptedGroup, ScriptedLink


@pytest.fixture
def group() -> Iterator[ScriptedGroup]:
    """Four ranks of one server."""
    started = ScriptedGroup()
    yield started
    started.end()


def assert_sum(group: ScriptedGroup, summed: Any, links: Sequence[ScriptedLink], seed: int = 1) -> None:
    """Let the links take the sum, which must be that of their ranks and rank 0."""
    size = len(summed)
    vectors = [group.make(rank, seed, size) for rank in (*sorted(link.rank for link in links), 0)]
    assert summed.tobytes() == add(vectors).tobytes()
    for link in links:
        link.await_sum(size)
        assert link.received[:size].tobytes() == summed.tobytes()


def test_vectors_are_added_in_order_of_rank_and_rank_0_last_whatever_arrives_first(
    group: ScriptedGroup,
) -> None:
    links = group.begin([1, 2, 3])
    for seed in range(3):
        summed = group.sum(seed) if seed == 1 else None
        for link in reversed(links):
            link.send_parts(group.make(link.rank, seed))
        assert_sum(group, (summed or group.sum(seed)).result(), links, seed)
    # Another order has other bits.
    vectors = [group.make(rank, 2) for rank in (0, 1, 2, 3)]
    assert add(vectors).tobytes() != links[0].received.tobytes()


def test_servers_are_added_among_themselves_and_then_to_the_sum_of_the_host() -> None:
    group = ScriptedGroup((0, 0, 2, 3))
    try:
        node, *servers = group.begin([1, 2, 3])
        for link in (*servers, node):
            link.send_parts(group.make(link.rank))
            if link is not node:
                link.send(Letter.VECTOR, json.dumps([link.rank]).encode())
        expected = add([group.make(2), group.make(3)]) + add([group.make(1), group.make(0)])
        assert group.sum().result().tobytes() == expected.tobytes()
    finally:
        group.end()


def test_vector_that_is_cut_off_is_left_out_and_what_was_sent_with_it_is_sent_again(
    group: ScriptedGroup,
) -> None:
    first, lost, third = group.begin([1, 2, 3])
    summed = group.sum()
    first.send_parts(group.make(1))
    third.send_parts(group.make(3))
    lost.send_parts(group.make(2), [0])
    first.await_letter(Letter.CHUNK)
    assert first.received[0] == add([group.make(rank)[:1] for rank in (1, 2, 3, 0)])[0]
    lost.close()
    assert_sum(group, summed.result(), [first, third])
    assert first.has_again
    assert group.host.counted == group.host.members == (0, 1, 3)
    assert group.host.lost == [(2, "its link was lost", False)]


def test_complete_vector_of_a_rank_that_is_lost_is_left_out_too(group: ScriptedGroup) -> None:
    first, lost, third = group.begin([1, 2, 3])
    for link in (first, lost, third):
        link.send_parts(group.make(link.rank))
    lost.close()
    assert eventually(lambda: group.host.look() or group.host.lost)
    assert_sum(group, group.sum().result(), [first, third])


def test_step_of_several_sums_is_void_when_a_rank_is_lost_between_them() -> None:
    group = ScriptedGroup((0, 0, 0), (40, SIZE))
    try:
        present, lost = group.begin([1, 2])
        for link in (present, lost):
            link.send_parts(group.make(link.rank, 1, 40), [0])
        assert_sum(group, group.sum(1, 40).result(), [present, lost])
        lost.close()
        summed = group.sum()
        present.send_parts(group.make(1))
        with pytest.raises(StepVoidError):
            summed.result()
        assert present.await_sum()[0] == 1
        assert group.host.members == (0, 1)
        for size in (40, SIZE):  # the step is taken anew from its first sum
            present.send_parts(group.make(1, 3, size), range(1 + (size == SIZE)))
            assert_sum(group, group.sum(3, size).result(), [present], 3)
    finally:
        group.end()


def test_rank_that_joins_takes_part_after_the_last_sum_of_the_step() -> None:
    group = ScriptedGroup((0, 0, 0), (40, 40))
    try:
        (first,) = group.begin([1])
        late = group.connect(2)
        group.host.admit([2])
        for _ in range(2):
            assert group.host.members == (0, 1)
            first.send_parts(group.make(1, 1, 40), [0])
            assert_sum(group, group.sum(1, 40).result(), [first])
        assert group.host.members == (0, 1, 2)
        for link in (first, late):
            link.send_parts(group.make(link.rank, 1, 40), [0])
        assert_sum(group, group.sum(1, 40).result(), [first, late])
    finally:
        group.end()


def test_rank_that_is_lost_before_it_takes_part_is_not_admitted(group: ScriptedGroup) -> None:
    first, second = group.begin([1, 2])
    group.connect(3).close()
    assert eventually(lambda: group.host.look() or 3 not in group.host.joining)
    group.host.admit([3])  # as if rank 0 did not know it yet
    for link in (first, second):
        link.send_parts(group.make(link.rank))
    assert_sum(group, group.sum().result(), [first, second])
    assert group.host.members == (0, 1, 2)


def test_step_that_is_given_up_is_taken_anew_and_what_was_sent_of_it_is_dropped(group: ScriptedGroup) -> None:
    first, second, third = group.begin([1, 2, 3])
    first.send_parts(group.make(1, 7))
    second.send_parts(group.make(2, 7), [0])
    with pytest.raises(StepVoidError):
        group.host.give_up_step()
    for link in (first, second, third):
        link.await_letter(Letter.VOID)
        link.send(Letter.VOIDED, NUMBER.pack(link.rank))
        link.send_parts(group.make(link.rank))
    assert_sum(group, group.sum().result(), [first, second, third])


def test_rank_that_confirms_two_aborted_steps_one_after_the_other_is_not_at_fault(
    group: ScriptedGroup,
) -> None:
    """It is slow: what it sends between its two answers belongs to the second of these steps."""
    links = group.begin([1, 2, 3])
    for _ in range(2):
        with pytest.raises(StepVoidError):
            group.host.give_up_step()
    for number in (7, 8):
        for link in links:
            link.await_letter(Letter.VOID)
            link.send(Letter.VOIDED, NUMBER.pack(link.rank))
            if number == 7:
                link.send(Letter.DATA, NUMBER.pack(link.rank) + b"of the aborted step")
                link.send_parts(group.make(link.rank, number))
    for link in links:
        link.send(Letter.DATA, NUMBER.pack(link.rank) + b"new")
        link.send_parts(group.make(link.rank))
    assert [group.host.receive(link.rank, 100, "samples") for link in links] == [b"new"] * 3
    assert_sum(group, group.sum().result(), links)


def test_rank_that_is_admitted_by_an_aborted_step_is_heard(group: ScriptedGroup) -> None:
    first, second = group.begin([1, 2])
    third = group.connect(3)
    group.host.admit([3])
    with pytest.raises(StepVoidError):
        group.host.give_up_step()
    for link in (first, second):
        link.await_letter(Letter.VOID)
        link.send(Letter.VOIDED, NUMBER.pack(link.rank))
    assert group.host.members == (0, 1, 2, 3)
    third.send(Letter.DATA, NUMBER.pack(3) + b"content")
    assert group.host.receive(3, 7, "samples") == b"content"


def test_rank_0_says_which_rank_it_waits_for_bytes_of(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "WAITING_INTERVAL_S", 0.01)
    first, *_ = group.begin([1, 2, 3])
    waited: list[list[int]] = []

    def note(ranks: list[int]) -> None:
        waited.append(ranks)
        if len(waited) == 2:
            first.send(Letter.DATA, NUMBER.pack(1) + b"content")

    monkeypatch.setattr(group.host, "_on_waiting", note)
    assert group.host.receive(1, 7, "samples") == b"content"
    assert waited[:2] == [[1], [1]]


def test_node_behind_a_server_joins_after_it() -> None:
    """Else rank 0 could admit the node alone, and its server would know nothing of it."""
    settings = HubSettings("joining", 1, "key", "node-key", (0, 1, 1), ((SIZE, 0),), 1 << 16)
    server = HubCommunicator(HubProcess(HUB_COMMAND), settings, lambda missing: None)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as host:
        host.connect("\0" + link_address("joining", 1, "node-key"))
        above = Channel(host)
        above.receive_descriptors(2)
        node = ScriptedLink("joining", 2)
        node.join()
        server.connect(lambda: None)
        node.send(Letter.DATA, NUMBER.pack(2) + b"after its JOIN")
        received = []
        while not received or received[-1] != (Letter.DATA, 2):
            letter, content = above.receive()
            if letter != Letter.OPEN:
                received.append((letter, NUMBER.unpack_from(content)[0]))
        assert received == [(Letter.DATA, 2)]
        server.join("hash")
        assert [NUMBER.unpack_from(above.receive()[1])[0] for _ in range(2)] == [1, 2]
    node.close()
    server.disconnect()


def test_values_of_all_ranks_reach_all_and_an_invalid_one_is_left_out(group: ScriptedGroup) -> None:
    links = group.begin([1, 2, 3])
    gathered = group.later(group.host.gather, "of 0", str)
    for link, value in zip(links, (b'"of 1"', b"[2]", b'"of 3"'), strict=True):
        link.send(Letter.VALUE, NUMBER.pack(link.rank) + value)
    assert gathered.result() == {0: "of 0", 1: "of 1", 3: "of 3"}
    assert links[0].await_letter(Letter.VALUES) == links[2].await_letter(Letter.VALUES)
    assert eventually(lambda: group.host.look() or group.host.lost)
    assert group.host.lost[0][0::2] == (2, True)
    assert "sent an invalid value" in group.host.lost[0][1]


def test_rank_that_waits_for_bytes_of_a_lost_rank_learns_it(group: ScriptedGroup) -> None:
    first, *_ = group.begin([1, 2, 3])
    first.send(Letter.DATA, NUMBER.pack(1) + b"content")
    assert group.host.receive(1, 7, "samples") == b"content"
    first.close()
    with pytest.raises(RankLostError):
        group.host.receive(1, 7, "samples")


def test_rank_that_sends_one_byte_too_many_is_named(group: ScriptedGroup) -> None:
    first, *_ = group.begin([1, 2, 3])
    first.send(Letter.DATA, NUMBER.pack(1) + b"content")
    with pytest.raises(PeerFaultError, match="sent 7 bytes, expected at most 6"):
        group.host.receive(1, 6, "samples")


def test_waits_are_those_for_ranks_that_came_after_rank_0(group: ScriptedGroup) -> None:
    first, second, third = group.begin([1, 2, 3])
    first.send_parts(group.make(1))
    second.send_parts(group.make(2))
    first.send(Letter.DATA, NUMBER.pack(1))  # behind it, the hub has the vector
    second.send(Letter.DATA, NUMBER.pack(2))
    group.host.receive(1, 0, "samples")
    group.host.receive(2, 0, "samples")
    summed = group.sum()
    third.send_parts(group.make(3), [0])
    first.await_letter(Letter.CHUNK)  # rank 0 has asked for the sum
    third.send_parts(group.make(3), [1])
    assert_sum(group, summed.result(), [first, second, third])
    assert [rank for rank, _ in group.host.waits] == [3]


def change(place: int, value: float) -> Callable[[ScriptedGroup, ScriptedLink], None]:
    """Return what sends a vector with one other element."""

    def send(group: ScriptedGroup, link: ScriptedLink) -> None:
        vector = group.make(link.rank)
        vector[place] = value
        link.send_parts(vector)

    return send


def post(letter: bytes, content: bytes = b"", num_parts: int = 0) -> Callable[..., None]:
    """Return what sends a message, after chunks of its vector."""

    def send(group: ScriptedGroup, link: ScriptedLink) -> None:
        link.send_parts(group.make(link.rank), range(num_parts))
        link.send(letter, content)

    return send


def send_three(group: ScriptedGroup, link: ScriptedLink) -> None:
    """Say at once that three chunks have arrived."""
    link.connection.sendall(3 * struct.pack("<cQ", Letter.CHUNK, 0))


def announce(group: ScriptedGroup, link: ScriptedLink) -> None:
    """Announce a terabyte."""
    link.connection.sendall(struct.pack("<cQ", Letter.DATA, 1 << 40))


FAULTS = {
    "more samples": (change(-8, 1e30), "sent the gradient of 1e+30 samples, expected 8"),
    "samples that are no number": (change(-8, np.nan), "sent the gradient of nan samples, expected 8"),
    "a stop of all": (change(-7, 1), "asked all ranks to stop"),
    "a duration": (change(-6, 1), "sent the duration of a step"),
    "the time of another rank": (change(-5, 30), "the time of another rank"),
    "no time": (change(-3, np.nan), "as the time of its step"),
    "not finite": (change(7, np.nan), "sent a gradient that is not finite"),
    "too many chunks": (send_three, "more chunks than the vector has"),
    "a vector of its own making": (post(Letter.VECTOR, b"[2]"), "an unexpected message"),
    "a value that is too large": (
        post(Letter.VALUE, NUMBER.pack(2) + bytes(MAX_VALUE_BYTES + 1)),
        "a value of",
    ),
    "a rank of another link": (post(Letter.JOIN, NUMBER.pack(1)), "a message in the name of another rank"),
    "a second start": (post(Letter.JOIN, NUMBER.pack(2)), "a second JOIN of a member"),
    "bytes of another rank": (post(Letter.DATA, NUMBER.pack(1)), "a message in the name of another rank"),
    "bytes of no rank": (post(Letter.DATA, b"123"), "a message in the name of another rank"),
    "the loss of another rank": (post(Letter.NOTE, b'[[1,"",true]]'), "the loss of another rank"),
    "a loss that is none": (post(Letter.NOTE, b"[1]"), "sent an invalid message"),
    "counters that are none": (post(Letter.TRAFFIC, b"[-1,0]"), "sent an invalid message"),
    "a step that it gives up": (post(Letter.VOIDED, NUMBER.pack(2)), "an abort of a step"),
    "a message that is for ranks": (post(Letter.TOTAL, b"\0"), "an unexpected message"),
    "a letter that is none": (post(b"?"), "an unexpected message"),
    "a terabyte announced": (announce, "its link was lost"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_link_that_breaks_a_rule_is_lost_alone_and_its_rank_is_named(group: ScriptedGroup, name: str) -> None:
    send, words = FAULTS[name]
    first, hostile, third = group.begin([1, 2, 3])
    summed = group.sum()
    for link in (first, third):
        link.send_parts(group.make(link.rank))
    send(group, hostile)
    assert_sum(group, summed.result(), [first, third])
    assert group.host.counted == group.host.members == (0, 1, 3)
    ((rank, reason, is_fault),) = group.host.lost
    assert rank == 2
    assert words in reason
    assert is_fault == (reason != "its link was lost")


def test_value_in_place_of_a_vector_is_lost_when_the_others_go_on(group: ScriptedGroup) -> None:
    first, hostile, third = group.begin([1, 2, 3])
    hostile.send(Letter.CLOSE, NUMBER.pack(2))
    gathered = group.later(group.host.gather, 0, int)
    first.send(Letter.VALUE, NUMBER.pack(1) + b"1")
    third.send(Letter.VALUE, NUMBER.pack(3) + b"3")
    assert gathered.result() == {0: 0, 1: 1, 3: 3}
    assert group.host.lost == [(2, "sent an unexpected message", True)]


def test_gradients_of_most_ranks_that_are_not_finite_are_summed(group: ScriptedGroup) -> None:
    """Then the training diverges."""
    first, second, third = group.begin([1, 2, 3])
    summed = group.sum()
    for link in (first, second):
        change(7, np.nan)(group, link)
    third.send_parts(group.make(3))
    assert np.isnan(summed.result()[7])
    assert group.host.members == (0, 1, 2, 3)


def test_end_of_a_vector_that_is_changed_behind_its_check_is_the_one_that_was_checked(
    group: ScriptedGroup,
) -> None:
    """A link of the host that another one controls can write to its vector at any time."""
    first, second, third = group.begin([1, 2, 3])
    summed = group.sum()
    for link in (first, second):
        link.send_parts(group.make(link.rank))
    third.send_parts(group.make(3), [0])
    first.await_letter(Letter.CHUNK)
    second.send(Letter.DATA, NUMBER.pack(2))  # behind it, the hub has added the vector
    assert eventually(lambda: group.host._arrived)
    second.vector[SIZE - 7 : SIZE] = 1e30
    third.send_parts(group.make(3), [1])
    assert_sum(group, summed.result(), [first, second, third])


BLOCKED_S = 1.0
"""A hub that takes nothing for so long takes no more."""


def resident_bytes(pid: int) -> int:
    """Return the memory of a process that is its own."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def test_bytes_that_rank_0_does_not_take_do_not_fill_the_hub(group: ScriptedGroup) -> None:
    hostile, *_ = group.begin([1, 2, 3])
    content = NUMBER.pack(1) + bytes(1 << 15)
    message = struct.pack("<cQ", Letter.DATA, len(content)) + content
    hub = group.host._hub.process.pid
    before = resident_bytes(hub)
    hostile.connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(8 * MAX_HELD_BYTES // len(message)):
            select.select([], [hostile.connection], [], BLOCKED_S)
            unsent = memoryview(message)
            while unsent:
                unsent = unsent[hostile.connection.send(unsent) :]
    assert resident_bytes(hub) - before < 3 * MAX_HELD_BYTES


def test_rank_that_sends_on_and_on_is_lost(group: ScriptedGroup) -> None:
    hostile, *_ = group.begin([1, 2, 3])
    for _ in range(NUM_KEPT + 2):
        hostile.send(Letter.DATA, NUMBER.pack(1) + bytes(1 << 16))
    assert eventually(lambda: group.host.look() or group.host.lost)
    assert group.host.lost == [(1, "sent more bytes than were asked for", True)]


def test_all_leave_together(group: ScriptedGroup) -> None:
    links = group.begin([1, 2, 3])
    closed = group.later(group.host.close)
    for link in links:
        link.send(Letter.CLOSE, NUMBER.pack(link.rank))
        assert not closed.done() or link is links[-1]
    for link in links:
        link.await_letter(Letter.CLOSE)
    closed.result()
