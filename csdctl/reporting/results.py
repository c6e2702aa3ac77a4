"""The results of a run, from its events and its manifest, and its state in a line."""

import os
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import log
from statistics import median
from typing import ClassVar, Literal

from csdctl.errors import InputError
from csdctl.perfmodel.spread import Range
from csdctl.reporting.energy import RunEnergy, add_up_energy
from csdctl.reporting.privacy import PassCounter, Privacy, measure_privacy
from csdctl.reporting.series import RunSeries, SeriesBuilder
from csdctl.reporting.tally import Tally
from csdctl.runs.directory import EVENT_BYTES, NUM_KILLED, Manifest, ProjectDirectory, RunDirectory, has_model
from csdctl.runs.ledger import MEASURED, read_power
from csdctl.runs.stored_events import find_end
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT
from csdctl.worker.protocol import events
from csdctl.worker.protocol.events import EpochEnd, Event, Progress
from csdctl.worker.protocol.file_state import file_state
from csdctl.worker.protocol.run_spec import BEST_MODEL, LAST_MODEL

COMPLETED, STOPPED, FAILED, INTERRUPTED = "completed", "stopped", "failed", "interrupted"
RUNNING = "running"
"""States of a run."""
NUM_COMPARED, MIN_COMPARED_STEPS, MAX_COMPARED_EVENTS = 8, 20, 10_000
"""Runs that are compared with their forecast, the least steps of each, and the first events to read."""
RESULTS = ("loss", "accuracy", "validation_loss", "validation_accuracy", "metrics", "validation_metrics")
"""Results of an epoch."""
MAX_EPOCHS = 1000
"""Epochs whose noise scale is remembered, and epochs whose weights are not yet known to be the same."""
MAX_FAILURES = 100
"""Failures that a summary lists, the first ones."""
NO_EPOCH = EpochEnd(
    rank=0, node="", epoch=0, steps=0, samples=0, compute_s=0.0, wait_s=0.0, wall_s=0.0, weights_hash=""
)
"""Stands for the latest end of an epoch before there is one."""


@dataclass(frozen=True)
class RankSummary:
    """One rank over the whole run."""

    rank: int
    node: str
    batch_size: int
    num_private: int
    num_public: int
    samples_per_s: float
    alone_samples_per_s: float | None
    """Measured in tuning, without synchronization."""
    compute_s: float
    wait_s: float

    JSON_PROPERTIES: ClassVar = ("waiting",)

    @property
    def waiting(self) -> float:
        """Waiting time as a share of compute and waiting time, 0…1."""
        total_s = self.compute_s + self.wait_s
        return self.wait_s / total_s if total_s else 0.0


@dataclass(frozen=True)
class RunSummary:
    """The whole run."""

    run_id: str
    state: str
    """'completed': rank 0 has sent a completion record, and no other rank has failed. 'stopped': by the user.
    'interrupted': csdctl did not record its end. 'running'. 'failed'."""
    emulated: bool
    method: str
    num_ranks: int
    global_batch: int
    epochs: int
    steps: int
    samples: int
    training_s: float
    """Seconds of steps and evaluation that rank 0 has reported, also of steps that were lost and repeated."""
    samples_per_s: float
    """Throughput: samples over step time, without evaluation and checkpoints."""
    predicted_samples_per_s: float | None
    alone_samples_per_s: float | None
    """The sum of the ranks' standalone throughput. Of a split: if its busiest rank never waited."""
    efficiency: float | None
    """samples_per_s over `alone_samples_per_s`, 0…1."""
    loss: float | None
    accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    metrics: Mapping[str, float]
    """Metrics of the last epoch, other than the accuracy. `validation_metrics`: on the validation data."""
    validation_metrics: Mapping[str, float]
    identical_weights: bool
    failures: tuple[str, ...]
    lost_nodes: tuple[str, ...]
    """Nodes that were lost during the run, including those that came back."""
    num_private_unread: int
    """Private samples, counted once per epoch, that were not read because their node was absent."""
    num_tried: int
    """Changes of batch sizes that were tried. `num_rebalanced`: those that were kept."""
    num_rebalanced: int
    ranks: tuple[RankSummary, ...]
    privacy: Privacy | None = None
    """The guarantee for private samples. None without noise."""
    strategy: str = DATA_PARALLEL
    """How machines shared the computation. `cut`: the last layer of the nodes, if the model was split."""
    cut: str = ""
    predicted_range: Range | None = None
    """9 of 10 runs are expected between these samples/s."""
    host_samples_per_s: float | None = None
    """Throughput that tuning predicted for the host alone, with the batch size of its choice."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, the median of all epochs."""
    energy: RunEnergy | None = None
    """None: no power source is configured in fleet.yaml."""
    best_epoch: int = 0
    """The epoch of best.keras: by what early stopping monitors, else by validation loss. 0: none."""
    best_validation_loss: float | None = None
    best_weights_hash: str = ""
    """SHA-256 of the weights that all ranks had at the end of that epoch."""
    weights_hash: str = ""
    """The same, at the end of the run."""
    left_out: tuple[str, ...] = ()
    """Nodes that the plan left out, because training is faster without them."""
    num_unreadable: int = 0
    """Lines of the stored events that could not be read, and are left out."""
    num_breaks: int = 0
    """Places in the stored events where lines are lost, repeated, moved, changed or of another run."""
    num_missing: int = 0
    """Epochs whose end is not in the stored events."""
    missing_models: tuple[str, ...] = ()
    """Files of saved models that are missing, unreadable or replaced: of another run or other weights."""
    reason: str = ""
    """Why it ended before its last epoch: 'early stopping', 'max steps' or 'asked to stop'."""


@dataclass
class RunFollower:
    """Follows what a run has come to from its events, in order, and keeps none of them."""

    passes: PassCounter
    tally: Tally = field(default_factory=Tally)
    latest: Progress | EpochEnd = NO_EPOCH
    """The latest report of rank 0."""
    last_epoch: EpochEnd = NO_EPOCH
    best_epoch: EpochEnd = NO_EPOCH
    """The latest end of an epoch of rank 0, and the one of best.keras."""
    changes: Counter[str] = field(default_factory=Counter)
    """Changes of batch sizes, by outcome."""
    noise_scales: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))
    """Of each epoch in which it is known."""
    lost_nodes: dict[str, None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    has_failed: bool = False
    """Whether a rank has failed since the latest steps."""
    finished: dict[int, str] = field(default_factory=dict)
    """Why it ended before its last epoch, of each rank that has finished."""
    weights_hash: str = ""
    """Of the model that rank 0 has saved."""
    open_epochs: dict[int, tuple[frozenset[int], dict[int, str]]] = field(default_factory=dict)
    """Epochs that did not end with the same weights on all ranks: who has to report, and the hashes."""
    latest_s: float | None = None
    """When the latest event arrived, in Unix time. None: there is none, or nobody has told."""

    @property
    def state(self) -> str:
        """The state that the events show."""
        if 0 not in self.finished or (self.has_failed and self.passes.members - self.finished.keys()):
            return FAILED if self.has_failed else INTERRUPTED
        return STOPPED if events.STOPPED in self.finished.values() else COMPLETED

    def add(self, event: Event) -> None:
        """Add an event."""
        self.tally.add(event)
        self.note(event)

    def note(self, event: Event) -> None:
        """Add an event that `tally` has already."""
        self.passes.add(event)
        if isinstance(event, Progress | EpochEnd):
            self._add_report(event)
        elif isinstance(event, events.Joined):
            self._join(event)
        elif isinstance(event, events.Finished):
            self.finished[event.rank] = event.reason
            self.weights_hash = event.weights_hash if event.rank == 0 else self.weights_hash
        elif isinstance(event, events.Failed):
            self.has_failed = True
            if len(self.failures) < MAX_FAILURES:
                self.failures.append(f"{event.node}: {event.message}")
        elif isinstance(event, events.CheckpointSaved) and event.is_best and event.rank == 0:
            self.best_epoch = self.last_epoch  # the event names the epoch that begins
        elif isinstance(event, events.NodeLost):
            self.lost_nodes[event.node] = None
        elif isinstance(event, events.Rebalanced):
            self.changes[event.outcome] += 1

    def _add_report(self, event: Progress | EpochEnd) -> None:
        self.has_failed = False
        if event.rank == 0:
            self.latest = event
        if isinstance(event, EpochEnd):
            self._compare_weights(event)
            if event.rank == 0:
                self.last_epoch = event
                self.noise_scales.extend(() if event.noise_scale is None else (event.noise_scale,))

    def _join(self, event: events.Joined) -> None:
        for rank in self.tally.newcomers:
            self.finished.pop(rank, None)  # the run was resumed
        for epoch, (needed, hashes) in [*self.open_epochs.items()]:  # not from ranks that were lost since
            self._close_epoch(epoch, needed & self.passes.members, hashes)

    def _compare_weights(self, event: EpochEnd) -> None:
        """Note the hash that a rank reports, before or after rank 0 does."""
        last = self.last_epoch
        is_closed = event.epoch == last.epoch and event.epoch not in self.open_epochs
        if is_closed and event.weights_hash == last.weights_hash:
            return  # of a rank that was lost since, or the epoch is repeated
        needed, hashes = self.open_epochs.get(event.epoch, (self.passes.members, {}))
        hashes[event.rank] = event.weights_hash
        self._close_epoch(event.epoch, self.passes.members if event.rank == 0 else needed, hashes)

    def _close_epoch(self, epoch: int, needed: frozenset[int], hashes: dict[int, str]) -> None:
        self.open_epochs.pop(epoch, None)
        is_closed = {0, *needed} <= hashes.keys() and len(set(hashes.values())) == 1
        if not is_closed and len(self.open_epochs) < MAX_EPOCHS:
            self.open_epochs[epoch] = needed, hashes


def summarize(run_id: str, manifest: Manifest, run: RunFollower) -> RunSummary:
    """Return the summary of a run, whose events `run` has followed."""
    plan, tally = manifest.plan, run.tally
    ranks = tuple(
        RankSummary(
            number,
            rank.node,
            rank.batch_size,
            num_private=shard.num_private,
            num_public=shard.num_public,
            samples_per_s=tally.ranks[number].own_throughput or 0.0,
            alone_samples_per_s=rank.samples_per_s,
            compute_s=tally.ranks[number].compute_s,
            wait_s=tally.ranks[number].wait_s,
        )
        for number, (rank, shard) in enumerate(zip(plan.ranks, manifest.placed, strict=True))
    )
    # --max-steps may end the run within an epoch, which has an end then, too.
    num_done = run.last_epoch.global_samples + run.last_epoch.num_lost
    num_samples = sum(shard.num_samples for shard in manifest.placed)
    is_within_epoch = run.finished.get(0) == events.MAX_STEPS and num_done < num_samples
    reports = tally.ranks[0]
    samples_per_s, reachable = reports.throughput or 0.0, None
    if manifest.strategy == SPLIT:
        busiest_s = max(rank.compute_s for rank in ranks)
        reachable = samples_per_s * reports.step_s / busiest_s if busiest_s else None
    elif manifest.strategy == DATA_PARALLEL:
        alone = [rank.alone_samples_per_s for rank in ranks if rank.batch_size]
        reachable = sum(rate or 0.0 for rate in alone) if all(alone) else None
    # A host alone would compute features once, too, and an emulated one would have the cores of the nodes.
    is_comparable = reachable and ranks[1:] and not plan.emulated
    best = run.best_epoch
    return RunSummary(
        run_id=run_id,
        state=run.state,
        reason=run.finished.get(0, ""),
        emulated=bool(plan.emulated),
        method=plan.method,
        num_ranks=len(ranks),
        global_batch=sum(rank.batch_size for rank in ranks),
        epochs=tally.num_epochs - is_within_epoch,
        num_missing=tally.num_missing,
        steps=tally.steps,
        samples=tally.samples,
        training_s=reports.wall_s,
        samples_per_s=samples_per_s,
        predicted_samples_per_s=manifest.predicted_samples_per_s,
        predicted_range=manifest.predicted_range,
        host_samples_per_s=plan.predicted.host_samples_per_s if is_comparable and plan.predicted else None,
        alone_samples_per_s=reachable,
        efficiency=samples_per_s / reachable if reachable and samples_per_s else None,
        **{name: getattr(run.last_epoch, name) for name in RESULTS},
        identical_weights=run.last_epoch != NO_EPOCH and not run.open_epochs,
        failures=tuple(run.failures),
        lost_nodes=tuple(run.lost_nodes),
        num_private_unread=tally.num_private_unread,
        num_tried=run.changes[events.TRIED],
        num_rebalanced=run.changes[events.KEPT],
        ranks=ranks,
        privacy=measure_privacy(manifest, run.passes),
        strategy=manifest.strategy,
        cut=manifest.cut,
        noise_scale=median(run.noise_scales) if run.noise_scales else None,
        best_epoch=best.epoch if best.validation_loss is not None else 0,
        best_validation_loss=best.validation_loss,
        best_weights_hash=best.weights_hash,
        weights_hash=run.weights_hash,
        # A rank that was added by hand takes part.
        left_out=tuple(name for name in plan.left_out if name not in manifest.nodes),
    )


@dataclass(frozen=True)
class RunResults:
    """One run."""

    summary: RunSummary
    series: RunSeries
    manifest: Manifest

    @property
    def measured(self) -> str:
        """The name of a measurement of this run."""
        return f"{MEASURED}, emulated fleet" if self.summary.emulated else MEASURED


def read_results(run: RunDirectory) -> RunResults:
    """Add up the events of a run in one pass. Raises InputError for a run without any."""
    manifest = run.read_manifest()
    nodes = manifest.nodes
    builder, stored = SeriesBuilder(nodes), run.read_events(nodes)
    follower = RunFollower(PassCounter(len(nodes)), builder.tally)
    for time_s, event in stored.with_times():
        builder.add(time_s, event)
        follower.note(event)
    summary, series = summarize(run.run_id, manifest, follower), builder.build()
    samples = {node: round(sum(series.samples[rank])) for rank, node in enumerate(series.nodes)}
    energy = add_up_energy(read_power(run), series.nodes, samples, series.trained)
    end = run.load_process()
    state, error = (str(end.get(key, "")) for key in ("state", "error"))
    summary = replace(
        summary,
        num_unreadable=stored.num_unreadable,
        num_breaks=stored.num_breaks,
        energy=energy if energy.machines else None,
        state=state or summary.state,
        failures=summary.failures or ((error,) if state == FAILED else ()),
    )
    return RunResults(summary, series, manifest)


def examine_results(run: RunDirectory) -> RunResults:
    """Return `read_results` with the saved models that are not as they were. Reads all of them."""
    results = read_results(run)
    summary = results.summary
    # Of a csdctl that was killed, the log may lack the end of the best epoch.
    complete_log = {EVENT_BYTES: run.count_event_bytes(), NUM_KILLED: 0}
    is_whole = complete_log.items() <= run.load_process().items()
    is_whole &= not summary.num_breaks + summary.num_missing + summary.num_unreadable
    saved = {BEST_MODEL: summary.best_weights_hash * is_whole} if summary.best_epoch else {}
    saved |= {LAST_MODEL: summary.weights_hash} if summary.state == COMPLETED else {}
    missing = tuple(name for name, weights in saved.items() if not has_model(run.path / name, weights))
    return replace(results, summary=replace(summary, missing_models=missing))


def list_forecast_errors(project: ProjectDirectory) -> tuple[float, ...]:
    """Return the logarithms of achieved over forecast throughput of the latest runs, of any job and fleet.

    A run counts if its plan had been tried, and all its nodes took part in all steps.
    """
    errors = []
    for run_id in project.run_ids()[-NUM_COMPARED:]:
        with suppress(InputError, OSError):  # incomplete, or not a run
            run, tally = project.find_run(run_id), Tally()
            manifest = run.read_manifest()
            nodes = manifest.nodes
            stored = run.read_events(nodes).skim() if manifest.predicted_range else ()  # of a trial
            compared = (event for _, event in islice(stored, MAX_COMPARED_EVENTS) if not tally.add(event))
            is_whole = all(len(getattr(event, "batch_sizes", nodes)) == len(nodes) for event in compared)
            predicted, rate = manifest.predicted_samples_per_s, tally.ranks[0].throughput
            if is_whole and predicted and rate and tally.ranks[0].steps >= MIN_COMPARED_STEPS:
                errors.append(log(rate / predicted))
    return tuple(errors)


@dataclass(frozen=True)
class RunStatus:
    """A run in a line."""

    run_id: str
    state: str
    job: str = ""
    strategy: str = DATA_PARALLEL
    num_ranks: int = 0
    epochs: int = 0
    """Planned number of epochs."""
    epoch: int = 0
    """The one that was trained last, from 1."""
    step: int = 0
    """In that epoch. 0: it has ended."""
    samples_per_s: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    last_event_s: float | None = None
    """Unix time."""
    emulated: bool = False
    reason: str = ""


@dataclass(frozen=True)
class KeptStatus:
    """The status of a run, which counts while the files that it was made from are as they were."""

    status: RunStatus
    files: dict[str, tuple[int, ...]]
    """Their states. csdctl appends to the log and replaces the others, so that size or inode changes."""
    has_ended: bool
    """Whether no csdctl may be at work on the run. Otherwise `follower` has followed the log to `end`."""
    follower: RunFollower | None = None
    end: tuple[int, int] = (0, 0)
    version: Literal[2] = 2
    """Incremented whenever the same files lead to another status."""


Statuses = dict[str, KeptStatus]
"""By run ID."""


def load_run_status(run: RunDirectory, kept: KeptStatus | None = None) -> KeptStatus:
    """Return what is known of `run`: `kept` if that counts. A log that has only grown is read on.

    A run whose manifest cannot be read has only its state. Raises InputError and OSError for other files.
    """
    paths = run.manifest, run.process, run.events
    files = {path.name: file_state(os.lstat(path))[1:] for path in paths if os.path.lexists(path)}
    # Without devices, which may differ after a reboot. A manifest that could not be read may be now.
    if kept and kept.files == files and kept.status.num_ranks:
        return kept
    try:
        manifest = run.read_manifest()
    except InputError:
        return KeptStatus(RunStatus(run.run_id, INTERRUPTED), files, has_ended=False)
    process = run.load_process()
    has_ended = not process or "ended" in process
    nodes, end = manifest.nodes, (0, 0) if has_ended else find_end(run.events)
    follower, start = RunFollower(PassCounter(len(nodes))), 0
    is_same = kept and kept.files.get(run.manifest.name) == files[run.manifest.name]
    if kept and kept.follower and is_same and find_end(run.events, kept.end[0]) == kept.end:
        follower, start = kept.follower, kept.end[0]
    for follower.latest_s, event in run.read_events(nodes).skim(start, None if has_ended else end[0]):
        follower.add(event)
    latest, last_epoch = follower.latest, follower.last_epoch
    epochs = manifest.recipe.get("epochs")
    status = RunStatus(
        run.run_id,
        str(process.get("state", "")) or follower.state,
        job=str(manifest.job.get("path", "")),
        strategy=manifest.strategy,
        num_ranks=len(nodes),
        epochs=epochs if type(epochs) is int else 0,
        epoch=latest.epoch,
        step=latest.step if isinstance(latest, Progress) else 0,
        loss=latest.loss,
        accuracy=latest.accuracy,
        validation_loss=last_epoch.validation_loss,
        validation_accuracy=last_epoch.validation_accuracy,
        reason=follower.finished.get(0, ""),
        samples_per_s=follower.tally.ranks[0].throughput,
        last_event_s=follower.latest_s,
        emulated=bool(manifest.plan.emulated),
    )
    return KeptStatus(status, files, has_ended, None if has_ended else follower, end)
