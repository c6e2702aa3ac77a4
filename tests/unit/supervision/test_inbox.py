"""The order in which messages are handled, and the message to handle again after an interrupt."""

import pytest

from csdctl.supervision.rank_processes import Inbox, RankMessage, Restarted
from csdctl.worker.protocol.events import Pong


def message(rank: int, number: int = 0) -> Pong:
    return Pong(rank, f"node{rank}", number)


class Source:
    """New messages, and those that have arrived."""

    def __init__(self, *messages: RankMessage | Restarted) -> None:
        self.messages = list(messages)
        self.arrived: list[RankMessage | Restarted] = []
        self.is_interrupted = False

    def receive(self, timeout_s: float) -> RankMessage | Restarted | None:
        return self.messages.pop(0) if self.messages else None

    def record_arrival(self, message: RankMessage | Restarted) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        self.arrived.append(message)

    def inbox(self) -> Inbox:
        return Inbox(self.receive, self.record_arrival)


def test_postponed_messages_come_first_and_arrive_once() -> None:
    source = Source(message(1), message(2), message(3))
    inbox = source.inbox()
    for _ in range(2):
        postponed = inbox.next_new(0.0)
        assert postponed
        inbox.postpone(postponed)
    assert [inbox.next(0.0) for _ in range(4)] == [message(1), message(2), message(3), None]
    assert source.arrived == [message(1), message(2), message(3)]


def test_message_interrupted_on_arrival_is_handled_before_all_others() -> None:
    source = Source(message(1), message(2), message(3))
    inbox = source.inbox()
    postponed = inbox.next_new(0.0)
    assert postponed
    inbox.postpone(postponed)
    source.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        inbox.next_new(0.0)
    source.is_interrupted = False
    inbox.requeue_unhandled()
    assert [inbox.next(0.0) for _ in range(3)] == [message(2), message(1), message(3)]


def test_postponed_messages_of_a_discarded_rank_are_dropped() -> None:
    inbox = Source().inbox()
    for number in range(2):
        inbox.postpone(message(1, number))
        inbox.postpone(message(2, number))
    inbox.discard(1)
    assert [inbox.next(0.0) for _ in range(3)] == [message(2, 0), message(2, 1), None]
