"""A run over time, from its events, one by one: time of each rank, epochs, faults.

Times are in a fixed number of intervals (`timeline`), however many events there are, and a series has at most
MAX_POINTS of everything else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median

from csdctl.reporting.numbers import format_bytes
from csdctl.reporting.tally import Amounts, Tally
from csdctl.worker.protocol import events
from csdctl.worker.protocol.events import EpochEnd, Event, Progress

MAX_INTERVALS = 128
"""A run with more has its intervals merged in pairs, and then half as many of twice the length."""
FIRST_INTERVAL_S = 1.0
"""Length of an interval before any are merged."""
MAX_POINTS = 1000
"""Epochs that a series keeps."""
MAX_FAULTS = 200
"""Faults that a series keeps, the first ones."""
COMPUTE, INPUT, WAIT, COMMUNICATION, OTHER = "compute", "input", "wait", "communication", "other"
KINDS = (COMPUTE, INPUT, WAIT, COMMUNICATION, OTHER)
"""Kinds of a rank's time. `wait`: for slower ranks. `communication`: the remaining time of a sum.
`other`: evaluation, checkpoints, comparing weights."""
BY_COMPUTE, BY_INPUT, BY_LINK = "compute", "input", "link"
"""Causes of a bottleneck."""
MIN_SHARE = 0.05
"""Share of the time of all ranks. With less waiting there is no bottleneck."""
SLOWER = 1.15
"""From this ratio on, compute time per sample has grown since the beginning of the run."""
LATEST, MIN_LATEST = 0.25, 4
"""Share of the run's intervals that counts as now, and the least number of them."""


class Timeline:
    """Adds up quantities over time: `amounts[series][quantity][interval]`, in memory of a fixed size."""

    def __init__(self, num_series: int, num_quantities: int) -> None:
        import numpy as np  # here, so that commands which only look after a fleet do without it

        self.interval_s = FIRST_INTERVAL_S
        self.num_intervals = 0
        """Intervals up to the last that has something."""
        self.amounts = np.zeros((num_series, num_quantities, MAX_INTERVALS))

    def add(self, series: int, begin_s: float, end_s: float, amounts: Sequence[float]) -> None:
        """Spread `amounts`, one per quantity, evenly over seconds after the start of the first interval.

        Earlier times count in it.
        """
        import numpy as np

        end = max(end_s, 0.0)
        begin = min(max(begin_s, 0.0), end)
        while end >= MAX_INTERVALS * self.interval_s:
            pairs = self.amounts[:, :, ::2] + self.amounts[:, :, 1::2]
            self.amounts = np.concatenate([pairs, np.zeros_like(pairs)], axis=2)
            self.interval_s *= 2
            self.num_intervals = (self.num_intervals + 1) // 2
        first, last = int(begin / self.interval_s), int(end / self.interval_s)
        self.num_intervals = max(self.num_intervals, last + 1)
        if first == last:
            self.amounts[series, :, first] += amounts
            return
        edges = np.clip(np.arange(first, last + 2) * self.interval_s, begin, end)
        self.amounts[series, :, first : last + 1] += np.outer(amounts, np.diff(edges) / (end - begin))

    def merge(self, quantity: int, into: int) -> None:
        """Move all amounts of one quantity to another."""
        self.amounts[:, into] += self.amounts[:, quantity]
        self.amounts[:, quantity] = 0.0


@dataclass(frozen=True)
class EpochPoint:
    """The end of an epoch, over all ranks. Metrics by name, for validation data with the prefix `val_`."""

    epoch: int
    time_s: float
    """Unix time."""
    samples_per_s: float | None
    """Throughput of its reported steps. None: there are none."""
    results: dict[str, float]
    learning_rate: float | None


@dataclass
class Fault:
    """A node or rank that failed, was lost, or came back."""

    time_s: float
    node: str
    what: str
    stopped_s: float | None = None
    """Seconds until the ranks trained again. None where they did not stop, or did not train again."""


@dataclass
class RunSeries:
    """A run over time. Values by rank are in order of rank."""

    nodes: tuple[str, ...]
    start_s: float = 0.0
    """Unix time of the first event."""
    interval_s: float = FIRST_INTERVAL_S
    spent_s: tuple[dict[str, list[float]], ...] = ()
    """Seconds in each interval, by rank and kind."""
    samples: tuple[list[float], ...] = ()
    """Samples in each interval, by rank."""
    links: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By rank: seconds for which rank 0 waited longest for its link, and bytes that it carried then."""
    global_samples: list[float] = field(default_factory=list)
    """Samples of all ranks in each interval, as rank 0 has reported them."""
    epochs: tuple[EpochPoint, ...] = ()
    faults: list[Fault] = field(default_factory=list)
    cpu_s: dict[int, float] = field(default_factory=dict)
    """CPU seconds of the ranks that reported them."""
    is_wait_divided: bool = True
    """Whether ranks told waiting from communication, which counts as waiting otherwise, and input from
    computing."""
    trained: list[tuple[float, float]] = field(default_factory=list)
    """From each start of rank 0 to the latest steps that it has reported since, in Unix time."""

    @property
    def num_intervals(self) -> int:
        """The number of intervals."""
        return len(self.samples[0]) if self.samples else 0

    def step_s(self, rank: int) -> list[float]:
        """Return the step time of a rank in each interval."""
        kinds = self.spent_s[rank]
        return [sum(parts) for parts in zip(*(kinds[kind] for kind in KINDS if kind != OTHER), strict=True)]

    def throughputs(self) -> list[float | None]:
        """Return the throughput of all ranks in each interval. None where no step was reported."""
        pairs = zip(self.global_samples, self.step_s(0), strict=True)
        return [count / seconds if count and seconds else None for count, seconds in pairs]


class SeriesBuilder:
    """Takes the events of a run in order of arrival, and keeps none of them."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._series = RunSeries(tuple(nodes))
        self.tally = Tally()
        """All that the ranks have reported."""
        self._timeline = Timeline(len(nodes), len(KINDS) + 2)
        self._until_s = [math.inf for _ in nodes]
        """By rank, when the latest progress within its epoch was reported, in Unix time."""
        self._epochs: list[EpochPoint] = []
        self._stop: Fault | None = None
        """The loss of rank 0, for whose return all ranks wait."""
        self.stopped_s = 0.0
        """How long the ranks last waited for rank 0 to begin again."""

    def add(self, time_s: float, event: Event) -> Amounts | None:
        """Add an event that arrived at `time_s`, in Unix time. Return what `Tally.add` does."""
        series = self._series
        series.start_s = series.start_s or time_s
        report = self.tally.add(event)
        if isinstance(event, Progress) and report:
            self._add_report(time_s, event.rank, report)
            if event.slow_link:
                rank, link_s, num_bytes = event.slow_link
                before = series.links.get(rank, (0.0, 0))
                series.links[rank] = before[0] + link_s, before[1] + num_bytes
        elif isinstance(event, EpochEnd) and report:
            self._add_report(time_s, event.rank, report)
            self._until_s[event.rank] = math.inf
            if event.rank == 0:
                rate, results = self.tally.epoch.throughput, epoch_results(event)
                self._drop_epochs(event.epoch)
                self._epochs.append(EpochPoint(event.epoch, time_s, rate, results, event.learning_rate))
        elif isinstance(event, events.Joined):
            for rank in self.tally.newcomers:
                self._until_s[rank] = math.inf
            if event.is_start:
                series.trained.append((time_s, time_s))
                self._drop_epochs(event.epoch)
                self._end_stop(time_s)
        elif (what := _describe_fault(event)) and len(series.faults) < MAX_FAULTS:
            fault = Fault(time_s, event.node, what)
            series.faults.append(fault)
            if (
                isinstance(event, events.NodeLost) and event.rank == 0
            ):  # without any other rank, training goes on
                self._stop = fault
        return report

    def build(self) -> RunSeries:
        """Return the series of all events so far."""
        series, timeline = self._series, self._timeline
        amounts = timeline.amounts[:, :, : timeline.num_intervals].tolist()
        series.interval_s = timeline.interval_s
        series.spent_s = tuple(dict(zip(KINDS, rows, strict=False)) for rows in amounts)
        series.samples = tuple(rows[len(KINDS)] for rows in amounts)
        series.global_samples = amounts[0][-1] if amounts else []
        series.cpu_s = {rank: done.cpu_s for rank, done in self.tally.ranks.items() if done.cpu_s}
        every = max(1, math.ceil(len(self._epochs) / MAX_POINTS))
        series.epochs = (*self._epochs[:-1:every], *self._epochs[-1:])
        return series

    def _add_report(self, time_s: float, rank: int, report: Amounts) -> None:
        """Within an epoch, every report begins where the one before ended: some arrive late."""
        series = self._series
        if rank == 0 and series.trained:
            series.trained[-1] = (series.trained[-1][0], time_s)
        self._until_s[rank] = end_s = min(time_s, self._until_s[rank] + report.wall_s)
        end_s -= series.start_s
        self._timeline.add(rank, end_s - report.wall_s, end_s, self._divide(report))

    def _divide(self, report: Amounts) -> list[float]:
        """Return the seconds of each kind, the samples of the rank, and the samples of all ranks."""
        input_s, others_s, wait_s = report.input_s, report.others_s, report.wait_s
        if others_s is None or input_s is None or not self._series.is_wait_divided:
            if self._series.is_wait_divided:
                self._timeline.merge(KINDS.index(INPUT), KINDS.index(COMPUTE))
                self._timeline.merge(KINDS.index(COMMUNICATION), KINDS.index(WAIT))
            self._series.is_wait_divided = False
            others_s, input_s = wait_s, 0.0
        waited, other_s = min(others_s, wait_s), max(report.wall_s - report.step_s, 0.0)
        seconds = [max(report.compute_s - input_s, 0.0), input_s, waited, wait_s - waited, other_s]
        return [*seconds, report.samples, report.global_samples]

    def _drop_epochs(self, first: int) -> None:
        while self._epochs and self._epochs[-1].epoch >= first:
            self._epochs.pop()

    def _end_stop(self, time_s: float) -> None:
        self.stopped_s = 0.0
        if self._stop and time_s >= self._stop.time_s:  # else the clock was set back
            self._stop.stopped_s = self.stopped_s = time_s - self._stop.time_s
        self._stop = None


def _describe_fault(event: Event) -> str:
    if isinstance(event, events.NodeLost):
        return f"lost: {event.message}"
    if isinstance(event, events.Failed):
        return f"failed: {event.message}"
    if isinstance(event, events.Misbehaved):
        return f"reports rank {event.culprit}: {event.message}"
    if isinstance(event, events.Warned):
        return event.message
    return "back" if isinstance(event, events.NodeBack) else ""


def epoch_results(event: EpochEnd) -> dict[str, float]:
    """Return loss and metrics by name, for validation data with the prefix `val_`."""
    results = {
        "loss": event.loss,
        "accuracy": event.accuracy,
        **event.metrics,
        "val_loss": event.validation_loss,
        "val_accuracy": event.validation_accuracy,
        **{f"val_{name}": value for name, value in event.validation_metrics.items()},
    }
    return {name: value for name, value in results.items() if value is not None}


@dataclass(frozen=True)
class Bottleneck:
    """The rank or link that held the others back."""

    rank: int | None
    """None where the ranks' own times cannot tell whose link it is."""
    cause: str
    since_s: float
    """Seconds after the start of the run."""
    lost_s: float
    """Time that each other rank lost, in the median."""
    why: str
    """The evidence for the cause."""


def find_bottleneck(series: RunSeries, *, is_now: bool = False) -> Bottleneck | None:
    """Return the rank that held the others back most. None where none did, or it was not recorded.

    With `is_now`, only the latest part of the run counts: who holds the others back now, and since when.
    """
    if not series.is_wait_divided or len(series.nodes) < 2 or not series.num_intervals:
        return None
    latest = max(MIN_LATEST, round(LATEST * series.num_intervals))
    first = max(0, series.num_intervals - latest) if is_now else 0
    spent = sum(sum(seconds[first:]) for kinds in series.spent_s for seconds in kinds.values())
    communication_s = [sum(kinds[COMMUNICATION][first:]) for kinds in series.spent_s]
    holders = [_find_holder(series, number) for number in range(series.num_intervals)]
    lost_s = {
        rank: sum(lost for holder, lost in holders[first:] if holder == rank)
        for rank in range(len(series.nodes))
    }
    rank = max(lost_s, key=lambda number: lost_s[number])
    shared_s = min(median(communication_s), communication_s[0])  # ranks wait for checkpoints of rank 0
    if max(lost_s[rank], shared_s) * len(series.nodes) < MIN_SHARE * spent:
        return None
    if shared_s > sum(lost_s.values()):
        why = f"sums took {shared_s:.1f} s per rank, more than waiting for others; larger batches need fewer"
        slowest, (link_s, num_bytes) = max(series.links.items(), key=itemgetter(1), default=(0, (0.0, 0)))
        if link_s < shared_s / 2:
            return Bottleneck(None, BY_LINK, 0.0, shared_s, why)
        share = min(1.0, shared_s * len(series.nodes) / spent)
        why = f"it carried {format_bytes(num_bytes / link_s)}/s both ways; sums took {share:.0%} of the time"
        since = _find_start(series.spent_s[0][COMMUNICATION], first) * series.interval_s
        return Bottleneck(slowest, BY_LINK, since, shared_s, why)
    start = _find_start([lost if holder == rank else 0.0 for holder, lost in holders], first)
    cause, why = _find_cause(series, rank, start)
    return Bottleneck(rank, cause, start * series.interval_s, lost_s[rank], why)


def _find_holder(series: RunSeries, number: int) -> tuple[int | None, float]:
    """Return who held the others back in an interval, and the seconds that they waited for it."""
    waits = {
        rank: kinds[WAIT][number]
        for rank, kinds in enumerate(series.spent_s)
        if kinds[COMPUTE][number] + kinds[INPUT][number] > 0
    }
    if len(waits) < 2:
        return None, 0.0
    holder = min(waits, key=lambda rank: waits[rank])
    lost_s = median(wait_s for rank, wait_s in waits.items() if rank != holder) - waits[holder]
    return (holder, lost_s) if lost_s > 0 else (None, 0.0)


def _find_start(lost_s: Sequence[float], first: int) -> int:
    """Return the interval from which on the most was lost that is above half of the mean since `first`.

    `lost_s`: what one rank cost the others in each interval.
    """
    usual_s = sum(lost_s[first:]) / max(1, len(lost_s) - first) / 2
    start, most, above_s = first, 0.0, 0.0
    for number in reversed(range(len(lost_s))):
        above_s += lost_s[number] - usual_s
        if above_s > most:
            start, most = number, above_s
    return start


def _find_cause(series: RunSeries, rank: int, start: int) -> tuple[str, str]:
    spent = series.spent_s[rank]
    input_s, compute_s = sum(spent[INPUT][start:]), sum(spent[COMPUTE][start:])
    if input_s > 0.5 * (input_s + compute_s):
        return BY_INPUT, f"reading samples took {input_s / (input_s + compute_s):.0%} of its time"
    pairs = zip(spent[COMPUTE], series.samples[rank], strict=True)
    times = [seconds / count for seconds, count in pairs if count > 0]
    quarter = max(1, len(times) // 4)
    at_first, at_last = median(times[:quarter] or [0.0]), median(times[-quarter:] or [0.0])
    if not at_first or at_last / at_first < SLOWER:
        return BY_COMPUTE, "its batch takes longer than the others'"
    return BY_COMPUTE, f"its time per sample grew to {at_last / at_first:.2f} times its initial value"
