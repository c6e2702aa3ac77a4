"""A rank and its link: two real processes, MPI included; the link is this program's child under mpirun."""

import json
import os
import socket
import time
from collections.abc import Iterator

import pytest

from csdctl.launch.mpirun import EAGER_LIMIT_BYTES
from csdctl.worker.group.channel import Channel, Listener, socket_name
from csdctl.worker.group.values import LinkLostError
from csdctl.worker.protocol.orders import COLLECTIVE_NAMES
from tests.attacks.hostile_link import HEAD, SERVE
from tests.linked_ranks import NUM_ELEMENTS, SIZE, Group

pytestmark = pytest.mark.first(2)


@pytest.fixture
def group() -> Iterator[Group]:
    started = Group(f"test-{os.getpid()}-{time.monotonic_ns()}")
    yield started
    started.end()


@pytest.mark.parametrize("collective", [*COLLECTIVE_NAMES, ""])
def test_ranks_sum_allgather_send_and_close(group: Group, collective: str) -> None:
    factor = SIZE * (SIZE + 1) / 2
    (chosen,) = set(group.all(f"choose {collective}"))
    assert chosen in ({collective} if collective else set(COLLECTIVE_NAMES))
    answers = group.all("sum")
    assert answers[0][:2] == [factor, factor * (NUM_ELEMENTS - 1)]
    assert answers == [answers[0]] * SIZE
    assert group.all("allgather") == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * SIZE
    group.send(0, "send 2")
    group.send(2, "receive 0 5000")
    assert (group.answer(0), group.answer(2)) == (1, 35_000)
    assert group.all("sum") == [answers[0]] * SIZE
    assert group.all("close") == [1] * SIZE
    assert group.mpirun.wait() == 0


def test_late_rank_gets_the_sum_of_all_ranks(group: Group) -> None:
    """Rank 0's link takes in what arrives before its own rank has anything to add."""
    group.all("choose star")
    for _ in range(3):
        group.send(1, "sum")
        group.send(2, "sum")
        time.sleep(0.3)
        group.send(0, "sum")
        answers = [group.answer(rank) for rank in range(SIZE)]
        assert answers == [answers[0]] * SIZE


@pytest.mark.fault(44)
def test_every_rank_notices_at_once_that_one_is_lost(group: Group) -> None:
    group.all("choose star")
    group.send(0, "sum")
    group.send(1, "sum")
    group.ranks[2].kill()
    assert [group.answer(0), group.answer(1)] == ["lost", "lost"]


def test_rank_reports_the_ranks_that_it_waits_for(group: Group) -> None:
    group.all("choose star")
    group.send(0, "sum")
    group.send(1, "sum")
    while (said := group.receive(0)) != {"missing": [2]}:
        assert said["missing"] == [1, 2]  # rank 1 was slow
    group.send(2, "sum")
    assert group.answer(0)[0] == SIZE * (SIZE + 1) / 2


def test_link_of_another_group_is_turned_away() -> None:
    run_id = f"test-{os.getpid()}-turned-away"
    listener = Listener(run_id, 0)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(socket_name(run_id, 0))
    Channel(connection).send(b"H", json.dumps({"generation": 1, "rank": 0, "size": 1}).encode())
    began = time.monotonic()
    assert listener.accept_link(2, lambda: time.monotonic() > began + 0.5) is None
    with pytest.raises(LinkLostError):
        Channel(connection).receive()


def test_traffic_between_ranks_is_counted_by_the_kernel(group: Group) -> None:
    group.all("choose star")
    before = {tuple(row[:3]): row[3] for row in group.all("traffic")[0]}
    for _ in range(3):
        group.all("sum")
    group.send(0, "send 2")
    group.send(2, "receive 0 5000")
    group.receive(0)
    group.receive(2)
    traffic = group.all("traffic")
    assert traffic[0] == traffic[1] == traffic[2]
    after = {tuple(row[:3]): row[3] for row in traffic[0]}
    vector_bytes = NUM_ELEMENTS * 4
    for pair in ((0, 1), (1, 0), (0, 2), (2, 0)):
        grown = after["sums", *pair] - before["sums", *pair]
        assert 3 * vector_bytes <= grown <= 3 * vector_bytes * 1.01
    assert after["samples", 0, 2] == 5000
    assert ("samples", 0, 1) not in after


SIZES = (3000, NUM_ELEMENTS)
"""Elements of the two sums of a step; the larger one is sent in chunks."""


@pytest.mark.parametrize("collective", COLLECTIVE_NAMES)
def test_each_sum_of_a_step_is_sent_with_its_own_size(group: Group, collective: str) -> None:
    factor = SIZE * (SIZE + 1) / 2
    group.all(f"choose {collective} {SIZES[0]} {SIZES[1]}")
    before = {tuple(row[:3]): row[3] for row in group.all("traffic")[0]}
    for _ in range(3):
        for size in SIZES:
            answers = group.all(f"part {size}")
            assert answers[0][0] == factor * (size - 1)
            assert answers == [answers[0]] * SIZE
    after = {tuple(row[:3]): row[3] for row in group.all("traffic")[0]}
    sent = sum(number - before[key] for key, number in after.items())
    # Both collectives send each vector of two ranks, and the sum to two ranks.
    assert 1 <= sent / (4 * 3 * 4 * sum(SIZES)) <= 1.01


def test_rank_whose_step_has_its_sums_in_another_order_is_refused(group: Group) -> None:
    for rank in range(SIZE):
        sizes = SIZES[::-1] if rank == 1 else SIZES
        group.send(rank, f"choose star {sizes[0]} {sizes[1]}")
    fault = group.answer(0)
    assert fault["culprit"] == 1
    assert f"sums {NUM_ELEMENTS}, 3000 elements in a step" in fault["message"]


SWAPS = f"""{HEAD}
class Swapped(collective.Star):
    def __init__(self, world, local, total, sizes):
        super().__init__(world, local, total, sizes[::-1])
collective.COLLECTIVES["star"] = Swapped
{SERVE}"""


def test_rank_that_sends_the_sums_of_a_step_in_another_order_than_it_says_is_refused() -> None:
    group = Group(f"test-{os.getpid()}-swaps", {1: SWAPS})
    try:
        for rank in range(SIZE):
            group.send(rank, f"choose star {SIZES[0]} {SIZES[1]}")
        fault = group.answer(0)
        assert (fault["culprit"], fault["message"]) == (1, "sent more than the 12000 bytes expected")
    finally:
        group.end()


@pytest.mark.parametrize("size", [5000, EAGER_LIMIT_BYTES + 1])
@pytest.mark.parametrize("is_expected", [False, True])
def test_ranks_that_post_to_each_other_wait_for_no_receive(
    group: Group, size: int, *, is_expected: bool
) -> None:
    """A message above mpirun's eager limit leaves when its receiver asks for it."""
    group.all("choose star")
    for request in (f"expect {{}} {size}",) * is_expected + (f"post {{}} {size}", f"receive {{}} {size}"):
        for rank, other in ((0, 1), (1, 0)):
            group.send(rank, request.format(other))
        expected = 7 * size if request.startswith("receive") else 1
        assert [group.answer(rank) for rank in (0, 1)] == [expected] * 2
    assert group.all("close") == [1] * SIZE
    assert group.mpirun.wait() == 0
