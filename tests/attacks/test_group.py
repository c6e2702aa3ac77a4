"""A node whose link sends the other ranks what no rank may send: over real MPI, between real processes."""

import mmap
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from csdctl.worker.group.messages import MAX_VALUE_BYTES
from tests.attacks.hostile_link import HEAD, RUN_COMMAND, SERVE, sends_messages, sends_value, sends_vector
from tests.emulated.training import is_python, processes
from tests.linked_ranks import SIZE, Group

pytestmark = pytest.mark.first(1)

CULPRIT = 2
HONEST = [rank for rank in range(SIZE) if rank != CULPRIT]


@contextmanager
def group_with(link: str) -> Iterator[Group]:
    """Three ranks; the link of the last one is `link`."""
    group = Group(f"attack-{os.getpid()}-{time.monotonic_ns()}", {CULPRIT: link})
    try:
        yield group
    finally:
        group.end()


def resident_mib(pid: int) -> int:
    """The memory of a process; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE >> 20
    except (OSError, IndexError):
        return 0


def answers_to(group: Group, request: str) -> list[Any]:
    """Send `request` to all ranks; return the answers of rank 0 and of the other honest rank."""
    for rank in range(SIZE):
        group.send(rank, request)
    return [group.answer(rank) for rank in HONEST]


def assert_culprit_is_named(answers: list[Any], *words: str) -> None:
    of_host, *others = answers
    assert of_host["culprit"] == CULPRIT, answers
    for word in words:
        assert word in of_host["message"], of_host
    assert len(of_host["message"]) < 500
    for other in others:
        assert other == "lost" or other["culprit"] in (0, CULPRIT), answers


@pytest.mark.attack(1)
def test_pickle_in_place_of_a_value_runs_nowhere_else(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    link = RUN_COMMAND.format(marker=marker) + sends_value("Command(__import__('pickle').dumps(Command()))")
    with group_with("import os\n" + link) as group:
        group.all("choose star")
        answers = answers_to(group, "allgather")
        assert not marker.exists()
        assert_culprit_is_named(answers, "sent an invalid value")
        assert group.mpirun.wait() != 0


@pytest.mark.attack(1)
def test_pickles_sent_to_every_tag_run_nowhere(tmp_path: Path) -> None:
    """The pickles have the form that mpi4py's lowercase calls expect."""
    marker = tmp_path / "marker"
    code = """
for tag in range(1, 20):
    for other in range(world.size - 1):
        comm.isend(Command(), other, tag)
comm.allgather(Command())
"""
    with group_with("import os\n" + RUN_COMMAND.format(marker=marker) + sends_messages(code)) as group:
        group.all("choose star")
        answers = answers_to(group, "allgather")
        assert not marker.exists()
        assert_culprit_is_named(answers)


ALIVE = """
def pass_on(*requests):
    while not all(request.Test() for request in requests):
        time.sleep(0.001)
"""
"""A first message between two ranks, and one above Open MPI's eager limit, move only while both call MPI."""
ANNOUNCED = "comm.Isend(struct.pack('<q', 100), 0, tags.GATHERED[0])\n"
VALUES = {
    "a terabyte announced": sends_messages("comm.Isend(struct.pack('<q', 1 << 40), 0, tags.GATHERED[0])"),
    "not JSON": sends_value("b'rank 2'"),
    "another type": sends_value("b'[1, 2]'"),
    "not a number": sends_value("b'{\"rank\": NaN}'"),
    "nested too deeply": sends_value("b'[' * 200_000"),
    "too long": sends_value(f"b' ' * {MAX_VALUE_BYTES + 1}"),
    "fewer bytes than none": sends_messages("comm.Isend(struct.pack('<q', -1), 0, tags.GATHERED[0])"),
    "a size of three bytes": sends_messages("comm.Isend(b'abc', 0, tags.GATHERED[0])"),
    "a size of 5 MB": sends_messages("pass_on(comm.Isend(bytes(5_000_000), 0, tags.GATHERED[0]))"),
    "less than announced": sends_messages(ANNOUNCED + "comm.Isend(bytes(99), 0, tags.GATHERED[1])"),
    "more than announced": sends_messages(ANNOUNCED + "comm.Isend(bytes(101), 0, tags.GATHERED[1])"),
}


@pytest.mark.attack(1)
@pytest.mark.first(2)
@pytest.mark.parametrize("link", VALUES.values(), ids=VALUES)
def test_value_or_size_that_is_not_allowed_is_its_ranks_fault_and_hangs_nobody(link: str) -> None:
    with group_with(ALIVE + link) as group:
        group.all("choose star")
        assert_culprit_is_named(answers_to(group, "allgather"), "sent ")


@pytest.mark.attack(1)
def test_receiver_allocates_what_it_expects_and_not_what_is_announced() -> None:
    link = sends_messages("pass_on(comm.Isend(struct.pack('<q', 1 << 40), 1, tags.MESSAGE[0]))")
    with group_with(ALIVE + link) as group:
        group.all("choose star")
        group.send(CULPRIT, "allgather")
        group.send(1, "receive 2 5000")
        assert group.answer(1) == {
            "culprit": CULPRIT,
            "message": f"sent {1 << 40} bytes, expected at most 5000",
        }


@pytest.mark.attack(1)
def test_messages_that_nobody_asks_for_do_not_fill_the_hosts_memory() -> None:
    code = f"""
for _ in range({MAX_FLOOD_BYTES} >> 20):
    pass_on(comm.Isend(bytes(1 << 20), 0, 99))
"""
    with group_with(ALIVE + sends_messages(code)) as group:
        group.all("choose star")
        (link,) = (pid for pid in processes(f"--run {group.run_id} --rank 0") if is_python(pid))
        before_mib = largest_mib = resident_mib(link)
        for rank in range(SIZE):
            group.send(rank, "allgather")
        while (now_mib := resident_mib(link)) and group.mpirun.poll() is None:
            if now_mib == largest_mib > before_mib + 1000:  # it takes no more
                break
            largest_mib = max(largest_mib, now_mib)
            time.sleep(0.2)
        assert largest_mib - before_mib < 2000


MAX_FLOOD_BYTES = 3 << 30
VECTORS = {
    "more samples": ("vector[-6] = 1e30", "samples, expected 8"),
    "a stop of all ranks": ("vector[-5] = 1", "asked all ranks to stop"),
    "a short chunk": ("comm.Isend(np.ones(5, np.float32), 0, 1)", "sent 20 bytes"),
    "a long chunk": ("comm.Isend(np.ones((1 << 18) + 1, np.float32), 0, 1)", "sent more than"),
    "samples that are no number": ("vector[-6] = math.nan", "the gradient of nan samples, expected 8"),
    "no time": ("vector[-2] = math.nan", "as the time of its step"),
    "the time of another rank": ("vector[-3] = 30", "the time of another rank"),
}


@pytest.mark.attack(8)
@pytest.mark.first(3)
@pytest.mark.parametrize("name", VECTORS)
def test_vector_that_no_rank_may_send_reaches_nobody(name: str) -> None:
    code, words = VECTORS[name]
    with group_with(ALIVE + sends_vector(code)) as group:
        group.all("choose star")
        answers = answers_to(group, "checked")
        assert_culprit_is_named(answers, words)
        assert answers[1] == "lost"


HIDES_IT = """
vector[7] = math.nan
chunks = collective.divide(len(self._local))
requests = [self._world.start_send(self._local[chunk.wire], 0, 1) for chunk in chunks]
for request in requests: collective.wait_sleeping(request)
vector[7] = 0
"""


@pytest.mark.attack(8)
@pytest.mark.first(2)
@pytest.mark.parametrize(
    "code", ["vector[7] = math.nan", HIDES_IT], ids=["sent", "hidden by the next vector"]
)
def test_gradient_that_is_not_finite_is_traced_to_its_rank(code: str) -> None:
    with group_with(sends_vector(code)) as group:
        group.all("choose star")
        answers_to(group, "checked")
        group.send(0, "not-finite")
        assert group.answer(0) == [CULPRIT]


@pytest.mark.attack(1)
def test_time_of_a_sum_that_is_none_is_its_ranks_fault() -> None:
    """While the ranks choose a collective."""

    link = f"""{HEAD}
import csdctl.worker.group.messages as messages
honest = messages.allgather
def tell(world, content, *rest, **options):
    return honest(world, b"NaN", *rest, **options)
messages.allgather = tell
{SERVE}"""
    with group_with(link) as group:
        answers = answers_to(group, "choose star")
        assert_culprit_is_named(answers, "sent an invalid value")


def test_harness_runs_what_a_pickle_says(tmp_path: Path) -> None:
    """The object of the attack does run a command where it is unpickled."""
    marker = tmp_path / "marker"
    names: dict[str, Any] = {"os": os}
    exec(RUN_COMMAND.format(marker=marker), names)
    names["Command"].__module__ = __name__
    pickle.loads(pickle.dumps(names["Command"]()))
    assert marker.read_text() == "ran\n"
