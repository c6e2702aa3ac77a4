"""A rank and its link: two real processes, MPI included; and which ranks Open MPI really connects."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csdctl.fleet.checks import pairs_to_try
from csdctl.launch.mpirun import ALLOW_ROOT, COMMON_OPTIONS, EAGER_LIMIT_BYTES
from csdctl.worker.group.channel import Answer, Channel, LinkGreeting, Listener, SharedVectors, socket_name
from csdctl.worker.group.communicator import LinkCommunicator
from csdctl.worker.group.values import LinkLostError, PeerFaultError
from csdctl.worker.protocol.orders import BETWEEN_SERVERS, COLLECTIVE_NAMES
from tests.attacks.hostile_link import HEAD, SERVE
from tests.linked_ranks import NUM_ELEMENTS, SIZE, Group, links
from tests.patience import run_command

pytestmark = pytest.mark.first(2)


@pytest.fixture
def group() -> Iterator[Group]:
    started = Group(f"test-{os.getpid()}-{time.monotonic_ns()}")
    yield started
    started.end()


def traffic_of(group: Group) -> dict[tuple[str, int, int], int]:
    """Return what has been sent, which all ranks say alike."""
    of_host, *others = group.all("traffic")
    assert others == [of_host] * (SIZE - 1)
    return {(what, sender, receiver): count for what, sender, receiver, count in of_host}


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


def test_late_rank_gets_the_sum_of_all_ranks_and_the_others_say_that_they_wait(group: Group) -> None:
    """A rank's link takes in what arrives before its own rank has anything to add."""
    group.all("choose star")
    for late in (0, 2, 0):
        others = [rank for rank in range(SIZE) if rank != late]
        for rank in others:
            group.send(rank, "sum")
        if late:
            while (said := group.receive(0)) != {"missing": [late]}:
                assert said["missing"] == [1, 2]  # rank 1 was slow
        else:
            time.sleep(0.3)
        group.send(late, "sum")
        answers = [group.answer(rank) for rank in range(SIZE)]
        assert answers == [answers[0]] * SIZE
        assert answers[0][0] == SIZE * (SIZE + 1) / 2
        waits = dict(group.all("waits")[0])
        assert not late or max(waits, key=lambda rank: waits[rank]) == late


@pytest.mark.fault(44)
def test_every_rank_notices_at_once_that_one_is_lost(group: Group) -> None:
    group.all("choose star")
    group.send(0, "sum")
    group.send(1, "sum")
    group.ranks[2].kill()
    assert [group.answer(0), group.answer(1)] == ["lost", "lost"]


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


SIZES = (3000, NUM_ELEMENTS)
"""Elements of the two sums of a step; the larger one is sent in chunks."""


@pytest.mark.parametrize("collective", COLLECTIVE_NAMES)
def test_each_sum_of_a_step_is_sent_with_its_own_size_and_counted_apart_from_messages(
    group: Group, collective: str
) -> None:
    factor = SIZE * (SIZE + 1) / 2
    group.all(f"choose {collective} {SIZES[0]} {SIZES[1]}")
    before = traffic_of(group)
    for _ in range(3):
        for size in SIZES:
            answers = group.all(f"part {size}")
            assert answers[0][0] == factor * (size - 1)
            assert answers == [answers[0]] * SIZE
    group.send(0, "send 2")
    group.send(2, "receive 0 5000")
    assert (group.answer(0), group.answer(2)) == (1, 35_000)
    after = traffic_of(group)
    assert [after.pop(key) for key in [*after] if key[0] == "samples"] == [5000]
    sent = {key[1:]: (number - before[key]) / (3 * 4 * sum(SIZES)) for key, number in after.items()}
    # Both collectives send each vector of two ranks, and the sum to two ranks.
    assert 4 <= sum(sent.values()) <= 4.04
    if collective == "star":
        assert all(1 <= sent[pair] <= 1.01 for pair in ((0, 1), (1, 0), (0, 2), (2, 0)))


SWAPS = f"""{HEAD}
class Swapped(collective.Star):
    def __init__(self, world, local, total, sizes):
        super().__init__(world, local, total, sizes[::-1])
collective.COLLECTIVES["star"] = Swapped
{SERVE}"""


ORDERS = {
    "said": ("", f"sums {NUM_ELEMENTS}, 3000 elements in a step"),
    "sent": (SWAPS, "sent more than the 12000 bytes expected"),
}


@pytest.mark.parametrize(("link", "said"), ORDERS.values(), ids=ORDERS)
def test_rank_whose_step_has_its_sums_in_another_order_is_refused(link: str, said: str) -> None:
    group = Group(f"test-{os.getpid()}-order-{len(link)}", {1: link} if link else {})
    try:
        for rank in range(SIZE):
            sizes = SIZES[::-1] if rank == 1 and not link else SIZES
            group.send(rank, f"choose star {sizes[0]} {sizes[1]}")
        fault = group.answer(0)
        assert fault["culprit"] == 1
        assert said in fault["message"]
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


NUM_RANKS = 7
PROGRAM = """
import numpy as np
from csdctl.worker.group.collective import choose_collective
from csdctl.worker.group.mpi import init_mpi
from csdctl.worker.group.messages import allgather
world = init_mpi()
if world.rank < 5:
    choose_collective(world.first(5), np.ones(1 << 18, np.float32), np.ones(1 << 18, np.float32), "star")
choose_collective(world, np.ones(1 << 18, np.float32), np.ones(1 << 18, np.float32), "star")
allgather(world, b"x" * (10 + world.rank))
allgather(world, b"y" * 200_000)
"""
CONNECTS = re.compile(r"\[1,(\d+)\]<stderr>:.*attempting to connect\(\) to \[\[\d+,1\],(\d+)\]")


@pytest.mark.fault(50)
def test_pairs_that_must_connect_are_those_that_open_mpi_connects() -> None:
    options = [word for option in COMMON_OPTIONS for word in option.split() if "node" not in option]
    options += ["--map-by", ":OVERSUBSCRIBE", "--mca", "btl_tcp_if_include", "127.0.0.0/8"]
    done = run_command(
        [
            *(str(Path(sys.prefix) / "bin" / "mpirun"), *options, "--mca", "btl_base_verbose", "100"),
            *("-np", str(NUM_RANKS), sys.executable, "-c", PROGRAM),
        ],
        env={**os.environ, **ALLOW_ROOT},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Open MPI's own messages come on the standard error of the rank, which mpirun passes on.
    connected = {tuple(sorted(map(int, pair))) for pair in CONNECTS.findall(done.stderr + done.stdout)}
    tried = pairs_to_try([str(rank) for rank in range(NUM_RANKS)])
    pairs = {tuple(sorted((int(one), int(other)))) for one, others in tried.items() for other in others}
    assert connected == pairs


SERVERS = [0, 0, 0, 3, 3, 3]
LINKS = [(0, 1), (0, 2), (3, 4), (3, 5), (0, 3)]
LEVEL_ELEMENTS = (1 << 18) + 1 + 2 + len(SERVERS)
"""The last ones are [n, stop, seconds of each rank]: more than one chunk."""
RANK_OF_A_SERVER = """
import json, sys
import numpy as np
from csdctl.worker.group.channel import Listener, SharedVectors
from csdctl.worker.group.communicator import LinkCommunicator
from csdctl.worker.group.communicator import TwoLevelCommunicator, by_server
from csdctl.worker.group.values import ExpectedTails, LinkLostError, PeerFaultError
from csdctl.worker.protocol.orders import BETWEEN_SERVERS
run, rank, num_elements, collective, deviation = sys.argv[1], *json.loads(sys.argv[2])
servers = by_server(range(6), [0, 0, 0, 3, 3, 3])
own = [members for members in servers if rank in members][0]
listener, memories, found = Listener(run, rank), [], {}
print("listening", flush=True)
while len(found) < 1 + (rank == own[0]):
    channel, greeting = listener.accept_link(1, lambda: False)
    memories.append(SharedVectors(num_elements))
    is_between = greeting.level == BETWEEN_SERVERS
    found[is_between] = LinkCommunicator(channel, greeting, memories[-1], lambda missing: None)
group = TwoLevelCommunicator(rank, servers, found[False].local, found[False], found.get(True))

def sum_once(count, value):
    group.local[:] = np.linspace(0, 1, num_elements) * value
    group.local[-8:] = 0
    group.local[-8], group.local[-6 + rank] = count, 0.5
    total = group.sum(group.local, ExpectedTails(num_elements - 8, tuple(range(6)), (2.0,) * 6))
    return [float(total[1000]), *map(float, total[-8:]), int(total.view(np.uint32).sum())]

answers = {}
try:
    group.choose_collective(collective)
    answers["collective"] = group.collective
    answers["sum_s"] = group.sum_s
    answers["tunnel_s"] = found[False].sum_s
    answers["first"] = sum_once(2, rank + 1)
    answers["second"] = sum_once(2, 10 * (rank + 1))
    answers["values"] = group.allgather({"rank": rank}, dict[str, int])
    for other in range(1, 6):
        if rank == 0:
            group.send(other, bytes([other]) * 1000, "samples")
        elif rank == other:
            answers["received"] = sum(group.receive(0, 1000, "samples"))
        else:
            group.relay(0, other, 1000, "samples")
    group.local[:] = np.nan if deviation == "nan" and rank == 4 else 1
    group.sum(group.local) if deviation == "nan" else sum_once(99 if deviation and rank == 4 else 2, 1)
    answers["not finite"] = group.find_not_finite()
    answers["traffic"] = [[r.what, r.sender, r.receiver, r.num_bytes] for r in group.traffic()]
    group.close()
except PeerFaultError as fault:
    answers["culprit"] = [fault.rank, fault.message]
    group.disconnect()
except LinkLostError:
    answers["lost"] = True
print(json.dumps(answers), flush=True)
"""


def run_group(collective: str, deviation: str = "") -> list[dict[str, Any]]:
    """Return what each rank has found."""
    run = f"test-{os.getpid()}-{time.monotonic_ns()}"
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(len(SERVERS)):
            arguments = json.dumps([rank, LEVEL_ELEMENTS, collective, deviation])
            command = [sys.executable, "-c", RANK_OF_A_SERVER, run, arguments]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        for process in ranks:
            assert process.stdout
            assert process.stdout.readline() == "listening\n"
        stack.enter_context(links(run, [0, 1, 2], level="host"))
        stack.enter_context(links(run, [3, 4, 5], level="storage2"))
        stack.enter_context(links(run, [0, 3], level=BETWEEN_SERVERS))
        return [json.loads(process.communicate()[0]) for process in ranks]


@pytest.mark.first(1)  # the next test has the other one
@pytest.mark.parametrize("collective", ["star", "allreduce"])
def test_two_servers_sum_gather_and_pass_on(collective: str) -> None:
    answers = run_group(collective)
    first = answers[0]["first"]
    assert first[0] == pytest.approx(21 * 1000 / (LEVEL_ELEMENTS - 1), rel=1e-5)
    assert first[1:9] == [12, 0, *[0.5] * 6]
    for rank, answer in enumerate(answers):
        assert answer["first"] == first, rank
        assert answer["second"] == answers[0]["second"], rank
        assert answer["values"] == [{"rank": other} for other in range(6)]
        assert answer.get("received", 0) == 1000 * rank
        assert answer["not finite"] == []
    assert [answer["collective"] for answer in answers] == 2 * [collective, "star", "star"]
    assert answers[0]["sum_s"] > max(answers[0]["tunnel_s"], answers[3]["tunnel_s"])
    assert answers[1]["traffic"] == answers[4]["traffic"] == []
    sent = {(what, sender, receiver): count for what, sender, receiver, count in answers[0]["traffic"]}
    pairs = {(sender, receiver) for _, sender, receiver in sent}
    assert pairs == {pair for one, other in LINKS for pair in ((one, other), (other, one))}
    assert sent["samples", 0, 3] == 3000
    assert sent["samples", 3, 5] == 1000


def test_server_finds_the_node_that_claims_more_samples_or_sends_what_is_not_finite() -> None:
    answers = run_group("allreduce", "claims")
    assert answers[3]["culprit"] == [4, "sent the gradient of 99 samples, expected 2"]
    assert "culprit" not in answers[0]
    assert run_group("star", "nan")[0]["not finite"] == [4]


def test_fault_that_a_link_found_before_it_was_asked_is_reported() -> None:
    ours, theirs = socket.socketpair()
    group = LinkCommunicator(Channel(ours), LinkGreeting(1, 0, 3), SharedVectors(8), lambda missing: None)
    os.close(Channel(theirs).receive_descriptor())
    Channel(theirs).send(Answer.FAULT, b'[2, "sent more"]')
    theirs.close()
    with pytest.raises(PeerFaultError, match="rank 2 sent more"):
        group.sum(group.local)
