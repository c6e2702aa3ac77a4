"""Totals of the ranks of a run, added up from their events. No other code adds up reports.

A rank reports each of its steps once: in a `Progress`, or in an `EpochEnd`. An `EpochEnd` has all steps since
the rank joined the others, so what was reported before is subtracted. Steps and samples are counted for the
model: a step that a restarted rank repeats, or that was lost with the state, counts once. Seconds and rates
cover all reports.
"""

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from csdctl.worker.protocol.events import EpochEnd, Event, Joined, Progress


@dataclass(frozen=True)
class Amounts:
    """One report of a rank, or the sum of several. Times in seconds. None: one of them does not say."""

    steps: int = 0
    samples: int = 0
    """Samples of the rank."""
    global_samples: int = 0
    """Samples of all ranks. Only rank 0 reports them."""
    compute_s: float = 0.0
    wait_s: float = 0.0
    wall_s: float = 0.0
    input_s: float | None = 0.0
    others_s: float | None = 0.0
    cpu_s: float | None = 0.0

    def __add__(self, report: "Amounts") -> "Amounts":
        pairs = zip(vars(self).values(), vars(report).values(), strict=True)
        values: list[Any] = [None if a is None or b is None else a + b for a, b in pairs]
        return Amounts(*values)

    def without(self, part: "Amounts") -> "Amounts":
        """Return what is left without `part`, at least 0 of everything."""
        pairs = zip(vars(self).values(), vars(part).values(), strict=True)
        values: list[Any] = [None if a is None else max(a - (b or 0), 0) for a, b in pairs]
        return Amounts(*values)

    @property
    def step_s(self) -> float:
        """Step time: computing, reading, waiting and communication."""
        return self.compute_s + self.wait_s

    @property
    def throughput(self) -> float | None:
        """Samples per second of step time over all ranks, of reports of rank 0. None without a step."""
        return self.global_samples / self.step_s if self.step_s else None

    @property
    def own_throughput(self) -> float | None:
        """Samples per second of step time of the rank itself. None without a step."""
        return self.samples / self.step_s if self.step_s else None


def members_of(event: Joined) -> frozenset[int]:
    """Return the ranks that take part from here on."""
    return frozenset(map(int, event.batch_sizes))


def newcomers_of(event: Joined, before: Set[int]) -> frozenset[int]:
    """Return the ranks that begin to take part here. Until now the ranks `before` took part."""
    lost = {rank for rank, _ in event.lost}
    return members_of(event) - (set() if event.is_start else before - lost)


@dataclass
class Tally:
    """Adds up the events of a run in order of arrival, and keeps none of them."""

    ranks: dict[int, Amounts] = field(default_factory=dict)
    """All reports, by rank."""
    epoch: Amounts = Amounts()
    """The reports of rank 0 in the current epoch. After its end, until the next one begins."""
    steps: int = 0
    """Steps of the model."""
    since_joined: dict[int, Amounts] = field(default_factory=dict)
    """By rank, the reports that the next end of an epoch includes."""
    members: frozenset[int] = frozenset()
    """The ranks that take part."""
    newcomers: frozenset[int] = frozenset()
    """The ranks that began to take part with the latest `Joined`."""
    ended: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Samples and unread private samples, by epoch that has ended."""
    num_missing: int = 0
    """Epochs whose end is not in the log: with as many samples as the largest."""
    current: int = 0
    """The epoch that `epoch` is of."""
    open_samples: int = 0

    def __post_init__(self) -> None:
        self.ranks = defaultdict(Amounts, self.ranks)
        self.since_joined = defaultdict(Amounts, self.since_joined)

    @property
    def samples(self) -> int:
        """Samples of the model's steps, over all ranks."""
        ended = [samples for samples, _ in self.ended.values()]
        return sum(ended) + self.num_missing * max(ended, default=0) + self.open_samples

    @property
    def num_epochs(self) -> int:
        """Epochs that have ended."""
        return len(self.ended) + self.num_missing

    @property
    def num_private_unread(self) -> int:
        """Private samples that were not read because their node was absent, once for each epoch."""
        return sum(unread for _, unread in self.ended.values())

    def add(self, event: Event) -> Amounts | None:
        """Add an event. Return what it reports that was not reported before. None: nothing of steps."""
        if isinstance(event, Joined):
            self._join(event)
        if not isinstance(event, Progress | EpochEnd):
            return None
        count = event.global_samples
        if isinstance(event, EpochEnd) and (event.stepped_samples or not event.steps):
            count = event.stepped_samples
        times = event.compute_s, event.wait_s, event.wall_s, event.input_s, event.others_s, event.cpu_s
        report, rank = Amounts(event.steps, event.samples, count, *times), event.rank
        if isinstance(event, EpochEnd):
            report = report.without(self.since_joined.pop(rank, Amounts()))
        else:
            self.since_joined[rank] += report
        self.ranks[rank] += report
        if rank == 0:
            self._follow(event, report)
        return report

    def _join(self, event: Joined) -> None:
        self.newcomers, self.members = newcomers_of(event, self.members), members_of(event)
        for rank in self.newcomers:
            self.since_joined.pop(rank, None)
        if not event.is_start:
            return
        self.steps = event.total_steps
        # A checkpoint may be older than the end of an epoch; a power failure may take ends from the log.
        self.ended = {epoch: ended for epoch, ended in self.ended.items() if epoch < event.epoch}
        self.num_missing = event.epoch - 1 - len(self.ended)
        if event.epoch_samples or not event.step or event.epoch != self.current:
            self.open_samples = event.epoch_samples

    def _follow(self, event: Progress | EpochEnd, report: Amounts) -> None:
        """Follow the position of the model, which rank 0 reports. The end of an epoch may come twice."""
        if event.epoch != self.current:
            self.current, self.epoch = event.epoch, Amounts()
        self.epoch += report
        self.steps += report.steps
        self.open_samples += report.global_samples
        if isinstance(event, EpochEnd):
            self.ended[event.epoch] = event.global_samples, event.num_lost
            self.open_samples = 0
