"""Reports of a workflow while it runs. Screens, the recorder of a run and callbacks consume them.

Besides the classes below, a stream has the events of ranks and of the supervisor (`worker.protocol.events`)
and the `Examination` of the machines before a training.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from csdctl.runs.directory import RunDirectory
from csdctl.shipping.deliver import Delivery
from csdctl.worker.protocol import datasets, events, run_spec

OnProgress = Callable[[str, datasets.PrepareProgress], None]
"""Called with the name of a machine or data set, and what it reports."""


@dataclass(frozen=True)
class Message:
    """One line of text for the user."""

    text: str


@dataclass(frozen=True)
class WorkStarted:
    """Work on data has started. Until it ends, there are only messages and the progress of this work."""

    what: str
    names: tuple[str, ...] = ()
    """The machines or data sets that will report, as far as they are known."""


@dataclass(frozen=True)
class WorkProgressed:
    """The progress of one machine or data set."""

    name: str
    progress: datasets.PrepareProgress


@dataclass(frozen=True)
class WorkEnded:
    """The work that started last has ended, with or without an error."""


@dataclass(frozen=True)
class FilesSent:
    """Files have reached a node."""

    node: str
    delivery: Delivery


@dataclass(frozen=True)
class RunStarted:
    """The ranks of a run are about to start."""

    run: RunDirectory
    spec: run_spec.RunSpec
    steps_per_epoch: int
    predicted_range: tuple[float, float] | None
    """Samples per second that 9 of 10 such runs reach. None: the plan predicts nothing."""
    emulated: bool = False
    past: Iterable[events.Event] = ()
    """The events of a run that is resumed, from before."""


Consumer = Callable[[object], None]
"""Gets each event. Progress of work comes from any thread, all else from the thread of the workflow."""


@dataclass(frozen=True)
class EventStream:
    """Passes each event of a workflow to all consumers, in their order."""

    consumers: tuple[Consumer, ...] = ()

    def emit(self, event: object) -> None:
        """Pass on one event. A slow consumer delays the workflow. Raises what a consumer raises."""
        for consumer in self.consumers:
            consumer(event)

    def say(self, text: str) -> None:
        """Report one line of text."""
        self.emit(Message(text))

    @contextmanager
    def working(self, what: str, names: Sequence[str] = ()) -> Iterator[OnProgress]:
        """Report the start and the end of work on data. Yields what reports its progress, from any thread."""
        self.emit(WorkStarted(what, tuple(names)))
        try:
            yield lambda name, progress: self.emit(WorkProgressed(name, progress))
        finally:
            self.emit(WorkEnded())
