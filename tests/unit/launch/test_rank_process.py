"""A probe session that is enlisted: a rank for one run, then released."""

import json
import queue
from collections.abc import Iterable
from pathlib import Path

import pytest

from csdctl.launch.rank_process import ProcessEnded, RankMessage, RankProcess
from csdctl.transport.fake import FakeConversation, FakeSession
from csdctl.worker.protocol.events import Finished, event_to_line
from csdctl.worker.protocol.orders import Order, Ping, Stop, order_to_line
from csdctl.worker.protocol.probe import READY

FINISHED = Finished(1, "csd0", 1, 2, "", 3)


class Enlisted:
    """The worker's end: it finishes when it is told to stop, and is ready for probes once released."""

    def __init__(self, tmp_path: Path, *, is_damaged: bool = False) -> None:
        self._is_damaged = is_damaged
        self.heard: queue.Queue[RankMessage] = queue.Queue()
        session = FakeSession("csd0").on("python", replies=self._reply)
        self.conversation: FakeConversation = session.converse(["python"])
        self.process = RankProcess(
            1, session, self.conversation, tmp_path / "log", self.heard.put, is_enlisted=True
        )

    def _reply(self, line: str) -> Iterable[str]:
        order = json.loads(line)["order"]
        if order == "Stop":
            return ["@csdctl {"] if self._is_damaged else [event_to_line(FINISHED)]
        return [READY] if order == "Release" else []

    def next(self) -> RankMessage:
        return self.heard.get(timeout=10)


def test_enlisted_process_is_released_when_it_has_finished(tmp_path: Path) -> None:
    rank = Enlisted(tmp_path)
    rank.process.order(Stop())
    assert rank.next() == FINISHED
    ended = rank.next()
    assert isinstance(ended, ProcessEnded)
    assert ended.is_clean
    rank.process.order(Ping(1))
    rank.process.close()
    said = [json.loads(line)["order"] for line in rank.conversation.sent]
    assert said == ["Stop", "Release"]  # the question would have been taken for a request
    assert not rank.conversation.is_closed


@pytest.mark.parametrize("order", [Stop(), Ping(1)])
def test_enlisted_process_that_has_not_finished_is_ended_on_closing(tmp_path: Path, order: Order) -> None:
    rank = Enlisted(tmp_path, is_damaged=True)
    rank.process.order(order)
    rank.process.close()
    assert rank.conversation.is_closed
    assert rank.conversation.sent == [order_to_line(order)]
