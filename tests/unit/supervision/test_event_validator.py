"""What a rank may report, after which orders and events."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from csdctl.supervision.rank_processes import (
    CHARS_PER_EVENT,
    EVENTS_PER_S,
    MAX_EVENTS_AT_ONCE,
    MAX_WAITING_AT_ONCE,
    EventValidator,
)
from csdctl.worker.protocol.events import (
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    Paused,
    Pong,
    Progress,
    Ready,
    Traffic,
    WaitingFor,
)
from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.orders import FormGroup, Order, Ping

NODES = ("host", "csd0", "csd1")
NUM_EPOCHS = 3
ME = (1, "csd0")
READY = Ready(*ME, 100, 0.1)
PROGRESS = Progress(*ME, 1, 1, 1, 8, 0.1, 0.1, 0.2)
FINISHED = Finished(*ME, 3, 30, "hash", 1)
FAILED = Failed(*ME, "disk full")
WAITING = WaitingFor(*ME, ("csd1",))
FIRST, SECOND = FormGroup(1, (0, 1, 2)), FormGroup(2, (0, 1))


def joined(order: FormGroup, epoch: int = 1) -> Joined:
    sizes = {str(rank): 8 for rank in order.ranks}
    return Joined(*ME, order.generation, epoch, 0, 10, 0, sizes, "star", 0.001)


def end_of(epoch: int) -> EpochEnd:
    return EpochEnd(*ME, epoch, 10, 80, 1.0, 0.1, 1.1, "hash")


def lost(generation: int) -> LinkLost:
    return LinkLost(*ME, generation, 1, 3)


def refusal(
    story: Iterable[Event | Order], *, rank: int = 1, must_join: bool = True, num_chars: int = 100
) -> str:
    """Return why the last event of a story is refused, '' when it is not; the others must not be."""
    validator = EventValidator(rank, NODES, num_epochs=NUM_EPOCHS, must_join=must_join)
    *before, last = story
    for item in before:
        tell(validator, item, num_chars)
    try:
        tell(validator, last, num_chars)
    except ProtocolError as error:
        return str(error)
    return ""


def tell(validator: EventValidator, item: Event | Order, num_chars: int) -> None:
    if isinstance(item, Event):
        validator.check(item, num_chars, now=0.0)
    else:
        validator.note_order(item)


@pytest.mark.parametrize(
    "story",
    [
        [READY, FIRST, joined(FIRST), PROGRESS, end_of(1), end_of(2), end_of(3), FINISHED],
        [READY, FIRST, joined(FIRST, epoch=3), end_of(3), FINISHED, Ping(1), Pong(*ME, 1)],
        [READY, FIRST, WAITING, joined(FIRST), WAITING, WAITING],
        [READY, FIRST, lost(1), SECOND, joined(SECOND), lost(2)],
        [READY, FIRST, joined(FIRST), end_of(1), lost(1), SECOND, joined(SECOND), end_of(1), FINISHED],
        [READY, FIRST, joined(FIRST), end_of(1), Paused(*ME, 1), SECOND, joined(SECOND, 2), end_of(2)],
        [READY, Ping(1), Ping(1), Pong(*ME, 1), Pong(*ME, 1)],
        [FAILED],
        [READY, FIRST, joined(FIRST), FINISHED, FAILED, Ping(1), Pong(*ME, 1)],
        # Fewer epochs than the run already has were asked for when it was resumed.
        [READY, FIRST, joined(FIRST, epoch=7), FINISHED],
        [READY, FIRST, joined(FIRST, epoch=7), end_of(7), FINISHED],
    ],
)
def test_what_a_worker_sends_is_accepted(story: list[Event | Order]) -> None:
    assert refusal(story) == ""


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ([READY, READY], "Ready: expected one Ready"),
        ([READY, PROGRESS], "Progress: expected nothing but Ready before a group is formed"),
        ([READY, joined(FIRST)], "Joined: expected nothing but Ready before a group is formed"),
        ([READY, FINISHED], "Finished: expected nothing but Ready before a group is formed"),
        ([READY, FIRST, PROGRESS], "Progress: expected Joined first"),
        ([READY, FIRST, FINISHED], "Finished: expected Joined first"),
        ([READY, FIRST, Paused(*ME, 1)], "Paused: expected Joined first"),
        ([READY, FIRST, joined(SECOND)], "Joined: expected generation 1, received 2"),
        ([READY, FIRST, joined(FIRST), joined(FIRST)], "Joined: expected one Joined"),
        ([READY, FIRST, lost(2)], "LinkLost: expected generation 1, received 2"),
        ([READY, FIRST, lost(1), lost(1)], "LinkLost: expected one LinkLost"),
        (
            [READY, SECOND, replace(joined(SECOND), batch_sizes={"0": 8, "1": 8, "2": 8})],
            "Joined: expected the batch sizes of the ranks of the group",
        ),
        ([READY, FIRST, joined(FIRST), end_of(1), end_of(1)], "EpochEnd: expected an epoch from 2 to 3"),
        ([READY, FIRST, joined(FIRST), end_of(4)], "EpochEnd: expected an epoch from 1 to 3, received 4"),
        ([READY, FIRST, joined(FIRST, 2), PROGRESS], "Progress: expected an epoch from 2 to 3, received 1"),
        ([READY, FIRST, joined(FIRST), FINISHED, FINISHED], "Finished: expected nothing after Finished"),
        ([FAILED, FAILED], "Failed: expected nothing after Failed"),
        ([FAILED, READY], "Ready: expected nothing after Failed"),
        ([READY, Pong(*ME, 1)], "Pong: expected one answer to each ping"),
        ([READY, Ping(1), Pong(*ME, 1), Pong(*ME, 1)], "Pong: expected one answer to each ping"),
        ([READY, Ping(1), Pong(*ME, 2)], "Pong: expected one answer to each ping"),
        ([replace(READY, rank=2, node="csd1")], "Ready: expected rank 1 on csd0, received rank 2 on 'csd1'"),
        ([replace(READY, node="csd1")], "Ready: expected rank 1 on csd0, received rank 1 on 'csd1'"),
    ],
)
def test_what_no_worker_sends_is_refused(story: list[Event | Order], expected: str) -> None:
    assert refusal(story).startswith(expected)


def test_task_whose_ranks_do_not_join_may_finish_without() -> None:
    assert refusal([READY, FIRST, FINISHED], must_join=False) == ""
    assert refusal([READY, FIRST, end_of(1)], must_join=False) == ""


def test_rank_0_is_checked_like_the_others() -> None:
    assert refusal([Ready(0, "host", 1, 0.1)] * 2, rank=0).startswith("Ready: expected one Ready")
    story = [Ready(0, "host", 1, 0.1), FIRST, Traffic(0, "host", 1, ())]
    assert refusal(story, rank=0, must_join=False) == ""


def test_rank_may_send_much_at_once_and_then_a_limited_number_per_second() -> None:
    validator = EventValidator(*ME[:1], NODES, num_epochs=1, must_join=False)
    validator.note_order(FIRST)
    cost = 2
    for _ in range(MAX_EVENTS_AT_ONCE // cost):
        validator.check(PROGRESS, CHARS_PER_EVENT, now=0.0)
    with pytest.raises(ProtocolError, match="at most 100 events of 1000 characters per second"):
        validator.check(PROGRESS, CHARS_PER_EVENT, now=0.0)
    for second in range(2, 10):
        for _ in range(EVENTS_PER_S // cost):
            validator.check(PROGRESS, CHARS_PER_EVENT, now=float(second))


def test_rank_that_says_all_the_time_that_it_waits_is_refused() -> None:
    story = [READY, FIRST, *[WAITING] * (MAX_WAITING_AT_ONCE + 1)]
    assert refusal(story) == "WaitingFor: expected at most 1 per second"
