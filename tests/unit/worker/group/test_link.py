"""Ranks, hubs and links: real processes, MPI included, on one server and on several."""

from collections.abc import Iterator

import pytest

from tests.linked_ranks import NUM_ELEMENTS, Group, expect_sum
from tests.patience import eventually

pytestmark = pytest.mark.first(2)

SERVERS = (0, 0, 0, 3, 3, 3, 6)
"""A host with two nodes, a server with two, and one without."""
NUM_HALVED = 262_000
SIZES = ((3000, 0), (NUM_ELEMENTS, 0))
"""Two sums of a step. The larger one is sent in chunks."""


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Ranks that take part. Three of one server where the test has no others."""
    options = getattr(request, "param", {})
    started = Group(**options)
    started.begin()
    yield started
    started.end()


def close(group: Group) -> None:
    """Let all ranks that are left end. Their mpiruns have no error."""

    assert group.all("close") == [None] * len(group.servers)
    assert [mpirun.wait() for mpirun in group.mpiruns.values()] == [0] * len(group.mpiruns)


def traffic_of(group: Group, server: int = 0) -> dict[tuple[str, int, int], int]:
    """Return what a rank with others behind it has sent to them, and they to it."""
    return {(what, *ends): count for what, *ends, count in group.call(server, "traffic")}


def test_ranks_sum_gather_send_and_close(group: Group) -> None:
    for seed in range(3):
        assert group.sum(seed)["sha"] == expect_sum(seed, group.servers)
    values = {"0": "value", "1": "value", "2": "value"}
    assert [answer["values"] for answer in group.all("gather", "value")] == [values] * 3
    before = traffic_of(group)
    group.call(0, "send", 2, 5000)
    group.call(1, "send", 0, 700_000)
    assert group.call(2, "receive", 0, 5000) == 35_000
    assert group.call(0, "receive", 1, 700_000) == 4_900_000
    assert group.sum(4)["sha"] == expect_sum(4, group.servers)
    after = traffic_of(group)
    assert after["samples", 0, 2] == 5000
    assert after["samples", 1, 0] == 700_000
    for pair in ((0, 1), (1, 0), (0, 2), (2, 0)):
        assert 4 * NUM_ELEMENTS <= after["sums", *pair] - before["sums", *pair] <= 4.04 * NUM_ELEMENTS
    close(group)


@pytest.mark.parametrize(
    "group",
    [{"servers": SERVERS}, {"servers": SERVERS, "sizes": ((NUM_ELEMENTS, NUM_HALVED),)}],
    ids=["float32", "bfloat16"],
    indirect=True,
)
def test_servers_and_their_nodes_sum_gather_send_and_close(group: Group) -> None:
    for seed in range(3):
        assert group.sum(seed)["sha"] == expect_sum(seed, SERVERS, group.sizes[0])
    everyone = range(len(SERVERS))
    values = {str(rank): "value" for rank in everyone}
    assert [answer["values"] for answer in group.all("gather", "value")] == [values] * len(SERVERS)
    for rank in everyone[1:]:
        group.call(0, "send", rank, 1000 * rank)
        assert group.call(rank, "receive", 0, 1000 * rank) == 7000 * rank
        group.call(rank, "send", 0, 10 * rank)
        assert group.call(0, "receive", rank, 10 * rank) == 70 * rank
    pairs = {(sender, receiver) for _, sender, receiver in traffic_of(group)}
    assert pairs == {pair for rank in (1, 2, 3, 6) for pair in ((0, rank), (rank, 0))}
    pairs = {(sender, receiver) for _, sender, receiver in traffic_of(group, 3)}
    assert pairs == {pair for rank in (4, 5) for pair in ((3, rank), (rank, 3))}
    close(group)


@pytest.mark.parametrize("group", [{"sizes": ((NUM_ELEMENTS, NUM_HALVED),)}], indirect=True)
def test_sum_of_bfloat16_has_the_same_bits_on_all_ranks_and_half_the_bytes(group: Group) -> None:
    before = traffic_of(group)
    for seed in range(3):
        assert group.sum(seed)["sha"] == expect_sum(seed, group.servers, group.sizes[0])
    after = traffic_of(group)
    sent_bytes = 3 * (4 * NUM_ELEMENTS - 2 * NUM_HALVED)
    for pair in ((0, 1), (1, 0)):
        assert sent_bytes <= after["sums", *pair] - before["sums", *pair] <= 1.02 * sent_bytes


@pytest.mark.parametrize(
    "group", [{"sizes": SIZES}, {"servers": (0, 0, 2, 2), "sizes": SIZES}], ids=["one", "two"], indirect=True
)
def test_sums_of_a_step_are_sent_with_their_own_sizes_and_a_step_can_be_given_up(group: Group) -> None:
    nodes = range(1, len(group.servers))
    for seed in range(2):
        for number in (0, 1):
            summed = group.sum(seed, number)
            assert summed["sha"] == expect_sum(seed, group.servers, SIZES[number])
        # Some have sent their first vectors, others wait for bytes of rank 0.
        group.send(1, "sum_up", 9, 0)
        for rank in nodes[1:]:
            group.send(rank, "receive", 0, 1)
        void = {"void": list(range(len(group.servers)))}
        assert [group.call(0, "give_up_step"), *map(group.answer, nodes)] == [void] * len(group.servers)
    for number in (0, 1):
        assert group.sum(5, number)["sha"] == expect_sum(5, group.servers, SIZES[number])
    # A step that is given up after its first sum is taken anew from that on.
    group.sum(6, 0)
    group.send(1, "sum_up", 9, 1)
    for rank in nodes[1:]:
        group.send(rank, "receive", 0, 1)
    assert [group.call(0, "give_up_step"), *map(group.answer, nodes)] == [void] * len(group.servers)
    for number in (0, 1):
        assert group.sum(7, number)["sha"] == expect_sum(7, group.servers, SIZES[number])
    close(group)


def kill_rank(group: Group) -> None:
    group.ranks[1].kill()


def kill_mpirun(group: Group) -> None:
    group.mpiruns[1].kill()


@pytest.mark.fault(44)
@pytest.mark.parametrize("kill", [kill_rank, kill_mpirun])
def test_others_have_their_sum_without_a_rank_that_is_killed_and_it_comes_back(group: Group, kill) -> None:  # type: ignore[no-untyped-def]
    assert group.sum(1)["counted"] == [0, 1, 2]
    for rank in (0, 2):
        group.send(rank, "sum_up", 2)
    kill(group)
    answers = [group.answer(rank) for rank in (0, 2)]
    assert (
        answers == [{"sha": expect_sum(2, (0, 0, 0), ranks=(0, 2)), "counted": [0, 2], "members": [0, 2]}] * 2
    )
    assert group.call(0, "note", "lost") == [[1, "its link was lost", False]]
    assert group.sum(3, ranks=(0, 2))["counted"] == [0, 2]
    group.restart_rank(1)
    assert eventually(lambda: 1 in map(int, group.call(0, "look")["joining"]))
    group.call(0, "admit", [1])
    summed = group.sum(4, ranks=(0, 2))
    assert (summed["counted"], summed["members"]) == ([0, 2], [0, 1, 2])
    assert group.call(0, "give", [1]) == group.answer(1) == [0, 1, 2]
    assert group.sum(5)["sha"] == expect_sum(5, group.servers)
    close(group)


@pytest.mark.parametrize("group", [{"servers": (0, 0, 2, 2, 2)}], indirect=True)
def test_loss_of_a_node_of_a_server_is_nobody_elses_and_that_of_a_server_is_its_nodes(group: Group) -> None:
    """Both come back."""
    servers, present = (0, 0, 2, 2, 2), (0, 1, 2, 4)
    assert group.sum(1)["sha"] == expect_sum(1, servers)
    for rank in present:
        group.send(rank, "sum_up", 2)
    group.ranks[3].kill()
    answers = [group.answer(rank) for rank in present]
    assert answers == [answers[0]] * 4
    assert answers[0]["sha"] == expect_sum(2, servers, ranks=present)
    assert answers[0]["members"] == list(present)
    assert group.call(0, "note", "lost") == [[3, "its link was lost", False]]
    group.restart_rank(3)
    assert eventually(lambda: "3" in group.call(0, "look")["joining"])
    group.call(0, "admit", [3])
    assert group.sum(3, ranks=present)["members"] == [0, 1, 2, 3, 4]
    assert group.call(0, "give", [3]) == group.answer(3) == [0, 1, 2, 3, 4]
    assert group.sum(4)["sha"] == expect_sum(4, servers)

    for rank in (0, 1, 3, 4):
        group.send(rank, "sum_up", 5)
    group.end_link(2)
    answers = [group.answer(rank) for rank in (0, 1)]
    assert answers == [answers[0]] * 2
    assert answers[0]["sha"] == expect_sum(5, servers, ranks=(0, 1))
    assert sorted(rank for rank, _, _ in group.call(0, "note", "lost")) == [2, 3, 4]
    assert [group.answer(rank) for rank in (3, 4)] == ["link lost"] * 2
    assert group.call(2, "gather", "x") == "link lost"
    for rank in (2, 3, 4):
        group.end_link(rank)
        group.start_link(rank)
    assert eventually(lambda: sorted(group.call(0, "look")["joining"]) == ["2", "3", "4"])
    group.call(0, "admit", [2, 3, 4])
    assert group.sum(6, ranks=(0, 1))["members"] == [0, 1, 2, 3, 4]
    everyone = [0, 1, 2, 3, 4]
    assert group.call(0, "give", [2, 3, 4]) == everyone
    assert [group.answer(rank) for rank in (2, 3, 4)] == [everyone] * 3
    assert group.sum(7)["sha"] == expect_sum(7, servers)
    close(group)


def test_rank_waits_for_a_late_one_and_says_so(group: Group) -> None:
    for rank in (0, 2):
        group.send(rank, "sum_up", 1)
    assert group.receive(0) == {"missing": [1]}
    group.send(1, "sum_up", 1)
    answers = [group.answer(rank) for rank in range(3)]
    assert answers == [answers[0]] * 3
    assert max(group.call(0, "note", "waits"), key=lambda wait: wait[1])[0] == 1


@pytest.mark.parametrize("group", [{"servers": (0, 0, 2, 2, 2)}], indirect=True)
def test_node_of_a_server_that_sends_what_no_rank_may_send_is_lost_alone(group: Group) -> None:
    for number, code in enumerate(("vector[7] = np.nan", "vector[-8] = 1e30")):
        culprit, honest = 3 + number, [0, 1, 2, *([4] if number == 0 else [])]
        group.send(culprit, "sum_up", number, 0, code)
        summed = group.sum(number, ranks=honest)
        assert summed["sha"] == expect_sum(number, group.servers, ranks=honest)
        assert summed["members"] == honest
        ((rank, _, is_fault),) = group.call(0, "note", "lost")
        assert (rank, is_fault) == (culprit, True)


@pytest.mark.parametrize("group", [{"servers": (0, 0, 2, 2)}], indirect=True)
def test_rank_0_can_evict_a_node_of_a_server(group: Group) -> None:
    group.call(0, "evict", 3, "has other weights than rank 0")
    assert group.await_lost(3) == ("has other weights than rank 0", True)
    assert group.sum(1, ranks=(0, 1, 2))["members"] == [0, 1, 2]
