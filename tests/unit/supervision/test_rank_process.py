"""A probe session that is attached: a rank for one run, then released."""

import json
import queue
from collections.abc import Iterable
from pathlib import Path

import pytest

from csdctl.runs.directory import CappedLog
from csdctl.supervision.rank_processes import EventValidator, ProcessEnded, RankMessage, RankProcess
from csdctl.worker.protocol.events import Finished, event_to_line
from csdctl.worker.protocol.orders import FormGroup, Order, Ping, Stop, order_to_line
from csdctl.worker.protocol.probe import READY
from tests.fake_session import FakeConversation, FakeSession
from tests.patience import WAIT_S, scaled

FINISHED = Finished(1, "csd0", 1, 2, "", 3)


class AttachedRank:
    """A rank on a fake worker: finishes when ordered to stop, and is ready for probes once released."""

    def __init__(self, tmp_path: Path, *, is_damaged: bool = False) -> None:
        self._is_damaged = is_damaged
        self.messages: queue.Queue[RankMessage] = queue.Queue()
        session = FakeSession("csd0").on("python", replies=self._reply)
        self.conversation: FakeConversation = session.converse(["python"])
        validator = EventValidator(1, ("host", "csd0"), num_epochs=1, must_join=False)
        log = CappedLog(tmp_path / "log", "csd0")
        self.process = RankProcess(1, session, self.conversation, validator, log, is_attached=True)
        self.process.listen(self.messages.put)
        self.process.send(FormGroup(1, (0, 1)))

    def _reply(self, line: str) -> Iterable[str]:
        order = json.loads(line)["order"]
        if order == "Stop":
            return ["@csdctl {"] if self._is_damaged else [event_to_line(FINISHED)]
        return [READY] if order == "Release" else []

    def next(self) -> RankMessage:
        return self.messages.get(timeout=scaled(WAIT_S))


def test_attached_process_is_released_when_it_has_finished(tmp_path: Path) -> None:
    rank = AttachedRank(tmp_path)
    rank.process.send(Stop())
    assert rank.next() == FINISHED
    ended = rank.next()
    assert isinstance(ended, ProcessEnded)
    assert ended.is_clean
    rank.process.send(Ping(1))
    rank.process.close()
    sent = [json.loads(line)["order"] for line in rank.conversation.sent]
    assert sent == ["FormGroup", "Stop", "Release"]  # the worker would take the ping for a probe request
    assert not rank.conversation.is_closed


@pytest.mark.parametrize("order", [Stop(), Ping(1)])
def test_attached_process_that_has_not_finished_is_ended_on_closing(tmp_path: Path, order: Order) -> None:
    rank = AttachedRank(tmp_path, is_damaged=True)
    rank.process.send(order)
    rank.process.close()
    assert rank.conversation.is_closed
    assert rank.conversation.sent[1:] == [order_to_line(order)]
