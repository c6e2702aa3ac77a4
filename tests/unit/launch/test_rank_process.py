"""A process that serves for probes too: a rank for one run, and given back."""

import json
import queue
from collections.abc import Iterable
from pathlib import Path

import pytest

from csdctl.launch.rank_process import Notice, ProcessEnded, RankProcess
from csdctl.transport.fake import FakeConversation, FakeSession
from csdctl.worker.contract import READY
from csdctl.worker.messages import AreYouThere, Finished, Stop, event_to_line, order_to_line

FINISHED = Finished(1, "csd0", 1, 2, "", 3)


class Lent:
    """The worker's end: it finishes when it is told to stop, and is ready for probes once released."""

    def __init__(self, tmp_path: Path, *, is_leaving: bool = False) -> None:
        self._is_leaving = is_leaving
        self.heard: queue.Queue[Notice] = queue.Queue()
        session = FakeSession("csd0").on("python", replies=self._reply)
        self.conversation: FakeConversation = session.converse(["python"])
        self.process = RankProcess(
            1, session, self.conversation, tmp_path / "log", self.heard.put, is_lent=True
        )

    def _reply(self, line: str) -> Iterable[str]:
        order = json.loads(line)["order"]
        if order == "Stop":
            return [event_to_line(FINISHED)] if not self._is_leaving else ["@csdctl {"]
        return [READY] if order == "Release" else []

    def next(self) -> Notice:
        return self.heard.get(timeout=10)


def test_lent_process_is_given_back_when_it_has_finished(tmp_path: Path) -> None:
    lent = Lent(tmp_path)
    lent.process.order(Stop())
    assert lent.next() == FINISHED
    ended = lent.next()
    assert isinstance(ended, ProcessEnded)
    assert ended.is_clean
    lent.process.order(AreYouThere(1))
    lent.process.close()
    said = [json.loads(line)["order"] for line in lent.conversation.sent]
    assert said == ["Stop", "Release"]  # the question would have been taken for a request
    assert not lent.conversation.is_closed


@pytest.mark.parametrize("order", [Stop(), AreYouThere(1)])
def test_lent_process_that_has_not_finished_is_ended_on_closing(tmp_path: Path, order: Stop) -> None:
    lent = Lent(tmp_path, is_leaving=True)
    lent.process.order(order)
    lent.process.close()
    assert lent.conversation.is_closed
    assert lent.conversation.sent == [order_to_line(order)]
