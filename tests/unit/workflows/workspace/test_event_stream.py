"""The stream of what a workflow reports."""

import pytest

from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.workflows.workspace.event_stream import (
    EventStream,
    Message,
    WorkEnded,
    WorkProgressed,
    WorkStarted,
)


def test_every_consumer_gets_every_event_in_order() -> None:
    first: list[object] = []
    second: list[object] = []
    events, progress = EventStream((first.append, second.append)), PrepareProgress(1, 2)
    events.say("begins")
    with events.working("preparing data", ["csd0"]) as on_progress:
        on_progress("csd0", progress)
    assert first == second
    assert first == [
        Message("begins"),
        WorkStarted("preparing data", ("csd0",)),
        WorkProgressed("csd0", progress),
        WorkEnded(),
    ]


def test_work_that_fails_ends_too() -> None:
    seen: list[object] = []
    with pytest.raises(ValueError, match="no disk"), EventStream((seen.append,)).working("preparing data"):
        raise ValueError("no disk")
    assert seen[-1] == WorkEnded()
