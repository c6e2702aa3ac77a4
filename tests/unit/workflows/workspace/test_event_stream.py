"""The stream of what a workflow reports."""

from contextlib import suppress

from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.workflows.workspace import event_stream
from csdctl.workflows.workspace.event_stream import EventStream, Message, WorkEnded, WorkProgressed


def test_every_consumer_gets_every_event_in_order_and_the_end_of_work_that_fails() -> None:
    first: list[object] = []
    second: list[object] = []
    events, progress = EventStream((first.append, second.append)), PrepareProgress(1, 2)
    events.say("begins")
    with suppress(ValueError), events.working("preparing data", ["csd0"]) as on_progress:
        on_progress("csd0", progress)
        raise ValueError
    begin = event_stream.WorkStarted("preparing data", ("csd0",))
    assert first == second == [Message("begins"), begin, WorkProgressed("csd0", progress), WorkEnded()]
