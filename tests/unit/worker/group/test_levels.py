"""Two servers with two nodes each: real links, an mpirun for each tunnel and one for the servers."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from csdctl.worker.group.communicator import by_server
from csdctl.worker.protocol.orders import BETWEEN_SERVERS
from tests.linked_ranks import links

SERVERS = [0, 0, 0, 3, 3, 3]
NUM_ELEMENTS = (1 << 18) + 1 + 2 + len(SERVERS)
"""The last ones are [n, stop, seconds of each rank]: more than one chunk."""
RANK = """
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
        ranks = [
            stack.enter_context(_started(run, [rank, NUM_ELEMENTS, collective, deviation]))
            for rank in range(len(SERVERS))
        ]
        for process in ranks:
            assert process.stdout
            assert process.stdout.readline() == "listening\n"
        stack.enter_context(links(run, [0, 1, 2], level="host"))
        stack.enter_context(links(run, [3, 4, 5], level="storage2"))
        stack.enter_context(links(run, [0, 3], level=BETWEEN_SERVERS))
        return [json.loads(process.communicate()[0]) for process in ranks]


@contextlib.contextmanager
def _started(run: str, arguments: list[Any]) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", RANK, run, json.dumps(arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_server_comes_first_among_its_ranks() -> None:
    servers = [0, 0, 5, 5, 0, 5]
    assert by_server([0, 2, 3, 4, 5], servers) == [[0, 3], [4, 1, 2]]


@pytest.mark.parametrize("collective", ["star", "allreduce"])
def test_two_servers_sum_gather_and_pass_on(collective: str) -> None:
    answers = run_group(collective)
    first = answers[0]["first"]
    assert first[0] == pytest.approx(21 * 1000 / (NUM_ELEMENTS - 1), rel=1e-5)
    assert first[1:9] == [12, 0, *[0.5] * 6]
    for rank, answer in enumerate(answers):
        assert answer["first"] == first, rank
        assert answer["second"] == answers[0]["second"], rank
        assert answer["values"] == [{"rank": other} for other in range(6)]
        assert answer.get("received", 0) == 1000 * rank
        assert answer["not finite"] == []
    assert [answer["collective"] for answer in answers] == [
        *(collective, "star", "star"),
        *(collective, "star", "star"),
    ]
    assert answers[1]["traffic"] == answers[4]["traffic"] == []
    sent = {(what, sender, receiver): count for what, sender, receiver, count in answers[0]["traffic"]}
    pairs = {(sender, receiver) for _, sender, receiver in sent}
    assert pairs == {
        *((0, 1), (1, 0), (0, 2), (2, 0), (3, 4), (4, 3), (3, 5), (5, 3)),
        *((0, 3), (3, 0)),
    }
    assert sent["samples", 0, 3] == 3000
    assert sent["samples", 3, 5] == 1000


def test_server_finds_the_node_that_claims_more_samples() -> None:
    answers = run_group("allreduce", "claims")
    assert answers[3]["culprit"] == [4, "sent the gradient of 99 samples, expected 2"]
    assert "culprit" not in answers[0]


def test_rank_0_learns_which_node_of_another_server_sent_what_is_not_finite() -> None:
    answers = run_group("star", "nan")
    assert answers[0]["not finite"] == [4]
