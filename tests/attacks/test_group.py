"""A node whose link violates the protocol: over real MPI, between real processes.

Each time, that rank alone is lost and named, and the others have a complete sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from csdctl.worker.group.mpi import BASE_BYTES
from tests.linked_ranks import Group, expect_sum

pytestmark = pytest.mark.first(1)

SERVERS = (0, 0, 0)
CULPRIT = 2
HONEST = (0, 1)

HEAD = """
import json, math, os, struct, sys, time
import numpy as np
import csdctl.worker.group.link as link
from csdctl.worker.group.channel import NUMBER, Letter
from csdctl.worker.group.link import BODY, CHUNK, HEAD, RankEnd

def head(letter, size):
    return struct.pack("<cqq", letter, size, 0).ljust(link.HEAD_BYTES, b"-")

def pass_on(*requests):
    while not all(request.Test() for request in requests):
        time.sleep(0.001)
"""
SERVE = """
link.serve_link(int(sys.argv[1]))
"""
RUN_COMMAND = """
class Command(bytes):
    def __reduce__(self):
        return os.system, ("echo ran >> {marker}",)
"""
"""Bytes whose pickle runs a command where it is loaded."""


def replaces(letter: str, code: str) -> str:
    """Return a link that runs `code` when its rank sends a message with `letter`, an expression.

    `code` has the memory `vector`, MPI's own `comm`, and `send(letter, content)`; `content` is what is sent
    then, if it is not None.
    """
    return f"""{HEAD}
honest = RankEnd.handle_local
def handle_local(self, letter, content):
    vector, comm, send = np.frombuffer(self._vector, np.float32), self.world._communicator, self.pass_over
    if letter == {letter}:
{indent(code.strip(), "        ")}
    if content is not None:
        honest(self, letter, content)
RankEnd.handle_local = handle_local
{SERVE}"""


def sends_value(content: str) -> str:
    """Return a link that sends the bytes `content`, an expression, as its rank's value."""
    return replaces("Letter.VALUE", f"content = NUMBER.pack(int(sys.argv[1])) + {content}")


def sends_messages(code: str) -> str:
    """Return a link whose part of a gathering is `code`."""
    return replaces("Letter.VALUE", f"{code.strip()}\ncontent = None")


def sends_vector(code: str) -> str:
    """Return a link that changes its vector by `code` before it is summed, or sends something else."""
    return replaces("Letter.VECTOR", code)


@contextmanager
def group_with(link: str, **options: Any) -> Iterator[Group]:
    """Three ranks that take part; the node's end of the last one's link is `link`."""
    group = Group(SERVERS, hostile={CULPRIT: link}, **options)
    try:
        group.begin()
        yield group
    finally:
        group.end()


def assert_lost_alone(group: Group, *words: str) -> None:
    """The culprit is named by `words`, or its link was lost, and the others go on."""
    reason, is_fault = group.await_lost(CULPRIT)
    for word in words:
        assert word in reason
    assert is_fault == bool(words)
    summed = group.sum(9, ranks=HONEST)
    assert summed["sha"] == expect_sum(9, SERVERS, ranks=HONEST)
    assert summed["members"] == list(HONEST)
    assert group.mpiruns[1].poll() is None


@pytest.mark.attack(1)
def test_pickle_in_place_of_a_value_runs_nowhere_else(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    link = sends_value("Command(__import__('pickle').dumps(Command()))")
    with group_with("import os" + RUN_COMMAND.format(marker=marker) + link) as group:
        gather(group)
        assert_lost_alone(group, "sent an invalid value")
        assert not marker.exists()


@pytest.mark.attack(1)
def test_pickles_sent_to_every_tag_run_nowhere(tmp_path: Path) -> None:
    """The pickles have the form that mpi4py's lowercase calls expect."""
    marker = tmp_path / "marker"
    code = """
for tag in range(20):
    comm.isend(Command(), 0, tag)
"""
    link = "import os" + RUN_COMMAND.format(marker=marker) + sends_messages(code)
    with group_with(link) as group:
        gather(group)
        assert_lost_alone(group, "sent ", " bytes")  # of a head or of a chunk, whichever is seen first
        assert not marker.exists()


def gather(group: Group) -> None:
    """Let all ranks gather; the honest ones get the values of both."""
    for rank in (CULPRIT, *HONEST):
        group.send(rank, "gather", "x")
    assert [group.answer(rank)["values"] for rank in HONEST] == [{"0": "x", "1": "x"}] * 2


ANNOUNCED = "comm.Isend(head(Letter.VALUE, 100), 0, HEAD)\n"
VALUES = {
    "nested too deeply": (sends_value("b'[' * 200_000"), "sent an invalid value"),
    "a terabyte announced": (
        sends_messages("comm.Isend(head(Letter.VALUE, 1 << 40), 0, HEAD)"),
        f"{1 << 40} bytes",
    ),
    "a head of three bytes": (sends_messages("comm.Isend(b'abc', 0, HEAD)"), "sent 3 bytes, expected 64"),
    "a head of 5 MB": (
        sends_messages("pass_on(comm.Isend(bytes(5_000_000), 0, HEAD))"),
        "sent more than the 64",
    ),
    "less than announced": (sends_messages(ANNOUNCED + "comm.Isend(bytes(99), 0, BODY)"), "sent 99 bytes"),
    "more than announced": (
        sends_messages(ANNOUNCED + "comm.Isend(bytes(101), 0, BODY)"),
        "sent more than the 100",
    ),
    "a verdict": (sends_messages("send(Letter.TOTAL, bytes(1))"), "a message that is not for hubs"),
}
"""Messages of a wrong form. Those of a wrong content are in tests/unit/worker/group/test_hub.py."""


@pytest.mark.attack(1, 8)
@pytest.mark.first(3)
@pytest.mark.parametrize(("link", "words"), VALUES.values(), ids=VALUES)
def test_message_that_no_rank_may_send_is_its_ranks_fault(link: str, words: str) -> None:
    with group_with(link) as group:
        gather(group)
        assert_lost_alone(group, words)


VECTORS = {
    "more samples": ("vector[-7] = 1e30", "samples, expected 8"),
    "a short chunk": ("comm.Isend(np.ones(5, np.float32), 0, CHUNK)", "sent 20 bytes"),
    "a long chunk": ("comm.Isend(np.ones((1 << 18) + 1, np.float32), 0, CHUNK)", "sent more than"),
    "hidden by the next vector": (
        "vector[7] = math.nan\nhonest(self, letter, content)\nvector[7] = 0",
        "a gradient that is not finite",
    ),
}


@pytest.mark.attack(8)
@pytest.mark.first(3)
@pytest.mark.parametrize(("code", "words"), VECTORS.values(), ids=VECTORS)
def test_vector_that_no_rank_may_send_reaches_nobody(code: str, words: str) -> None:
    with group_with(sends_vector(code)) as group:
        for rank in (CULPRIT, *HONEST):
            group.send(rank, "sum_up", 1)
        answers = [group.answer(rank) for rank in HONEST]
        assert answers == [answers[0]] * 2
        assert answers[0]["sha"] == expect_sum(1, SERVERS, ranks=HONEST)
        assert answers[0]["counted"] == list(HONEST)
        assert_lost_alone(group, words)


@pytest.mark.attack(1)
def test_messages_that_nobody_asks_for_end_their_own_link_alone() -> None:
    """MPI keeps what nobody has asked for, until the memory of the link's end on the host is used up."""
    code = f"""
for _ in range({4 * BASE_BYTES} >> 20):
    pass_on(comm.Isend(bytes(1 << 20), 0, 99))
"""
    with group_with(sends_messages(code)) as group:
        gather(group)
        assert_lost_alone(group)


def test_honest_link_of_this_kind_takes_part() -> None:
    """The programs of the attacks are links like others but for what they change."""
    with group_with(HEAD + SERVE) as group:
        assert group.sum(1)["sha"] == expect_sum(1, SERVERS)
