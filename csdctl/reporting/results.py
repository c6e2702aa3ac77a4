"""The results of a run, from its events and its manifest, and its state in a line."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import log
from statistics import median
from typing import Any

from csdctl.documents import load_kept
from csdctl.errors import InputError
from csdctl.perfmodel.spread import Range
from csdctl.reporting.energy import RunEnergy, add_up_energy
from csdctl.reporting.privacy import PassCounter, Privacy, measure_privacy
from csdctl.reporting.series import RunSeries, SeriesBuilder
from csdctl.reporting.tally import Tally, members_of, newcomers_of
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.ledger import MEASURED, read_power
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT
from csdctl.worker.protocol.events import (
    MAX_STEPS,
    CheckpointSaved,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    NodeLost,
    Progress,
    Rebalanced,
)
from csdctl.worker.protocol.events import STOPPED as ASKED_TO_STOP

COMPLETED, STOPPED, FAILED, INTERRUPTED = "completed", "stopped", "failed", "interrupted"
RUNNING = "running"
"""States of a run: `stopped` by the user, and `interrupted` when its csdctl was killed."""
NUM_COMPARED, MIN_COMPARED_STEPS, MAX_COMPARED_EVENTS = 8, 20, 10_000
"""The runs whose throughput is compared with their forecast, the steps that each must have, and the first
events of it that are read: those of about an hour."""
RESULTS = ("loss", "accuracy", "validation_loss", "validation_accuracy", "metrics", "validation_metrics")
"""Results of an epoch."""
MAX_EPOCHS = 1000
"""Epochs whose noise scale is remembered, and epochs of which not all ranks have reported the same weights; a
run that goes well has one of these at a time."""


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
    """'completed' with a completion record from every rank that took part at the end, 'stopped' when the user
    stopped it, 'interrupted' when csdctl did not record its end, 'running', else 'failed'."""
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
    """The sum of the ranks' standalone throughput; of a split, the throughput if its busiest rank never
    waited."""
    efficiency: float | None
    """samples_per_s over `alone_samples_per_s`, 0…1."""
    loss: float | None
    accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    metrics: Mapping[str, float]
    """Metrics of the last epoch, other than the accuracy; `validation_metrics` on the validation data."""
    validation_metrics: Mapping[str, float]
    identical_weights: bool
    failures: tuple[str, ...]
    lost_nodes: tuple[str, ...]
    """Nodes that were lost during the run, including those that came back."""
    num_private_unread: int
    """Private samples, counted once per epoch, that were not read because their node was absent."""
    num_rebalanced: int
    """The number of times that batch sizes changed."""
    ranks: tuple[RankSummary, ...]
    privacy: Privacy | None = None
    """The guarantee for private samples; None without noise."""
    strategy: str = DATA_PARALLEL
    """What was computed where; `cut`: the last layer of the nodes, if the model was split."""
    cut: str = ""
    predicted_range: Range | None = None
    """9 of 10 runs are expected between these samples/s; None: unknown."""
    host_samples_per_s: float | None = None
    """Throughput that tuning predicted for the host alone, with the batch size of its choice."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, the median of all epochs; None: not known."""
    energy: RunEnergy | None = None
    """None: no power source is configured in fleet.yaml."""
    best_epoch: int = 0
    """The epoch of best.keras: by what early stopping monitors, else by validation loss; 0: none."""
    best_validation_loss: float | None = None
    """That of `best_epoch`."""
    left_out: tuple[str, ...] = ()
    """Nodes that the plan left out, because training is faster without them."""
    num_unreadable: int = 0
    """Lines of the stored events that could not be read, and are left out."""
    reason: str = ""
    """Why it ended before its last epoch: 'early stopping', 'max steps' or 'asked to stop'."""


def summarize(run_id: str, manifest: dict[str, Any], events: Iterable[Event], tally: Tally) -> RunSummary:
    """Add up a run. `manifest` is its manifest.json, and `tally` has the events at the end, too."""
    plan = manifest["plan"]
    run = _Run(len(plan["ranks"]))
    for event in events:
        run.add(event)
    ranks = tuple(
        RankSummary(
            number,
            rank["node"],
            rank["batch_size"],
            num_private=placed["num_private"],
            num_public=placed["public_stop"] - placed["public_start"],
            samples_per_s=tally.ranks[number].own_throughput or 0.0,
            alone_samples_per_s=rank.get("samples_per_s"),
            compute_s=tally.ranks[number].compute_s,
            wait_s=tally.ranks[number].wait_s,
        )
        for number, (rank, placed) in enumerate(zip(plan["ranks"], manifest["placed"], strict=True))
    )
    # --max-steps may end the run within an epoch, which has an end then, too.
    done = run.last.global_samples + run.last.num_lost
    num_samples = sum(rank.num_private + rank.num_public for rank in ranks)
    is_within_epoch = run.finished.get(0) == MAX_STEPS and done < num_samples
    whole = tally.ranks[0]
    strategy, speed = manifest.get("strategy", DATA_PARALLEL), whole.throughput or 0.0
    all_alone = _reachable(strategy, ranks, whole.step_s, speed)
    # A host alone would compute features once, too, and an emulated one would have the cores of the nodes.
    is_comparable = all_alone and ranks[1:] and not plan.get("emulated")
    training = {rank.node for rank in ranks}
    predicted = (is_comparable and plan.get("predicted")) or {}
    return RunSummary(
        run_id=run_id,
        state=run.state,
        reason=run.finished.get(0, ""),
        emulated=bool(plan.get("emulated")),
        method=plan["method"],
        num_ranks=len(ranks),
        global_batch=sum(rank.batch_size for rank in ranks),
        epochs=tally.num_epochs - is_within_epoch,
        steps=tally.steps,
        samples=tally.samples,
        training_s=whole.wall_s,
        samples_per_s=speed,
        predicted_samples_per_s=manifest.get("predicted_samples_per_s"),
        predicted_range=manifest.get("predicted_range"),
        host_samples_per_s=predicted.get("host_samples_per_s"),
        alone_samples_per_s=all_alone,
        efficiency=speed / all_alone if all_alone and speed else None,
        **{name: getattr(run.last, name) for name in RESULTS},
        identical_weights=run.has_identical_weights,
        failures=tuple(run.failures),
        lost_nodes=tuple(run.lost_nodes),
        num_private_unread=tally.num_private_unread,
        num_rebalanced=run.num_rebalanced,
        ranks=ranks,
        privacy=measure_privacy(manifest, run.passes),
        strategy=strategy,
        cut=manifest.get("cut", ""),
        noise_scale=median(run.noise_scales) if run.noise_scales else None,
        best_epoch=run.best.epoch if run.best.validation_loss is not None else 0,
        best_validation_loss=run.best.validation_loss,
        # A rank that was added by hand takes part.
        left_out=tuple(name for name in plan.get("left_out", ()) if name not in training),
    )


def _reachable(strategy: str, ranks: Sequence[RankSummary], steps_s: float, speed: float) -> float | None:
    """Return the rate that `efficiency` is relative to. None where it was not measured."""
    if strategy == SPLIT:
        busiest_s = max(rank.compute_s for rank in ranks)
        return speed * steps_s / busiest_s if busiest_s else None
    alone = [rank.alone_samples_per_s for rank in ranks if rank.batch_size]
    return sum(rate for rate in alone if rate) if strategy == DATA_PARALLEL and all(alone) else None


class _Run:
    """Follows the state of a run from its events, in order, and keeps none of them."""

    def __init__(self, num_ranks: int) -> None:
        self._has_ended_epochs = False
        self.passes = PassCounter(num_ranks)
        self.last = EpochEnd(0, "", 0, 0, 0, 0.0, 0.0, 0.0, "")
        """The latest end of an epoch of rank 0, which has the results of all ranks; none at first."""
        self.best = self.last
        self.num_rebalanced = 0
        self.noise_scales: deque[float] = deque(maxlen=MAX_EPOCHS)
        """Of each epoch in which it is known."""
        self.lost_nodes: dict[str, None] = {}
        self.failures: list[str] = []
        """The first 100."""
        self._has_failed = False
        """Whether a rank has failed since the latest steps."""
        self._members = frozenset(range(num_ranks))
        self.finished: dict[int, str] = {}
        """Why it ended before its last epoch, of each rank that has finished."""
        self._open: dict[int, tuple[frozenset[int], dict[int, str]]] = {}
        """Epochs that did not end with the same weights on all ranks: who has to report, and the hashes."""
        self._has_lost_epochs = False
        """Whether more epochs were open than there can be in a run."""

    @property
    def state(self) -> str:
        """As in `RunSummary.state`."""
        if self._members - self.finished.keys():
            return FAILED if self._has_failed else INTERRUPTED
        return STOPPED if ASKED_TO_STOP in self.finished.values() else COMPLETED

    @property
    def has_identical_weights(self) -> bool:
        """As in `RunSummary.identical_weights`."""
        return self._has_ended_epochs and not self._has_lost_epochs and not self._open

    def add(self, event: Event) -> None:
        self.passes.add(event)
        has_trained = isinstance(event, Progress | EpochEnd)
        self._has_failed = isinstance(event, Failed) or (self._has_failed and not has_trained)
        if isinstance(event, Joined):
            self._join(event)
        elif isinstance(event, Finished):
            self.finished[event.rank] = event.reason
        elif isinstance(event, EpochEnd):
            self._has_ended_epochs = True
            self._compare_weights(event)
            if event.rank == 0:
                self.last = event
                if event.noise_scale is not None:
                    self.noise_scales.append(event.noise_scale)
        elif isinstance(event, Failed):
            if len(self.failures) < 100:
                self.failures.append(f"{event.node}: {event.message}")
        elif isinstance(event, CheckpointSaved) and event.is_best and event.rank == 0:
            self.best = self.last  # the event names the epoch that begins
        elif isinstance(event, NodeLost):
            self.lost_nodes[event.node] = None
        self.num_rebalanced += isinstance(event, Rebalanced)

    def _join(self, event: Joined) -> None:
        newcomers = newcomers_of(event, self._members)
        self._members = members_of(event)
        for rank in newcomers:
            self.finished.pop(rank, None)  # the run was resumed
        for epoch, (needed, hashes) in [*self._open.items()]:  # not from ranks that were lost since
            self._close_epoch(epoch, needed & self._members, hashes)

    def _compare_weights(self, event: EpochEnd) -> None:
        """Note the hash that a rank reports, before or after rank 0 does."""
        is_closed = event.epoch == self.last.epoch and event.epoch not in self._open
        if event.rank and is_closed and event.weights_hash == self.last.weights_hash:
            return  # of a rank that was lost since
        needed, hashes = self._open.get(event.epoch, (self._members, {}))
        hashes[event.rank] = event.weights_hash
        self._close_epoch(event.epoch, self._members if event.rank == 0 else needed, hashes)

    def _close_epoch(self, epoch: int, needed: frozenset[int], hashes: dict[int, str]) -> None:
        """Forget an epoch once all ranks that took part in its end agree."""
        self._open.pop(epoch, None)
        if {0, *needed} <= hashes.keys() and len(set(hashes.values())) == 1:
            return
        if len(self._open) < MAX_EPOCHS:
            self._open[epoch] = needed, hashes
        else:
            self._has_lost_epochs = True


@dataclass(frozen=True)
class RunResults:
    """One run."""

    summary: RunSummary
    series: RunSeries
    manifest: dict[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    """Paths by what they are."""

    @property
    def measured(self) -> str:
        """What a measurement of this run is called."""
        return f"{MEASURED}, emulated fleet" if self.summary.emulated else MEASURED


def read_results(run: RunDirectory) -> RunResults:
    """Add up the events of a run in one pass. Raises InputError for a run without any."""
    manifest: Any = run.load_manifest()
    nodes = [rank["node"] for rank in manifest["plan"]["ranks"]]
    builder, events = SeriesBuilder(nodes), run.read_events(nodes)

    def passing() -> Iterator[Event]:
        for time_s, event in events.with_times():
            builder.add(time_s, event)
            yield event

    summary = summarize(run.run_id, manifest, passing(), builder.tally)
    series = builder.build()
    samples = {node: round(sum(series.samples[rank])) for rank, node in enumerate(series.nodes)}
    energy = add_up_energy(read_power(run), series.nodes, samples, series.trained)
    summary = replace(
        summary, num_unreadable=events.num_unreadable, energy=energy if energy.machines else None
    )
    state, error = read_end(run)
    failures = summary.failures or ((error,) if state == FAILED else ())
    summary = replace(summary, state=state or summary.state, failures=failures)
    files = {"run directory": run.path, "trained model": run.model, "model of the best epoch": run.best_model}
    found = {name: str(path) for name, path in files.items() if path.exists()}
    return RunResults(summary, series, manifest, found)


def list_forecast_errors(project: ProjectDirectory) -> tuple[float, ...]:
    """Return the logarithms of achieved over forecast throughput of the latest runs, of any job and fleet.

    A run counts if its plan had been tried as it is, and all its nodes took part in all steps.
    """
    errors = []
    for run_id in project.run_ids()[-NUM_COMPARED:]:
        with suppress(InputError, OSError, KeyError, TypeError, ValueError):  # incomplete, or not a run
            run, tally = project.find_run(run_id), Tally()
            manifest: Any = run.load_manifest()
            nodes = [rank["node"] for rank in manifest["plan"]["ranks"]]
            events = run.read_events(nodes).skim() if manifest["predicted_range"] else ()  # that of a trial
            compared = (event for _, event in islice(events, MAX_COMPARED_EVENTS) if not tally.add(event))
            is_whole = all(len(getattr(event, "batch_sizes", nodes)) == len(nodes) for event in compared)
            if is_whole and tally.ranks[0].steps >= MIN_COMPARED_STEPS:
                errors.append(log(tally.ranks[0].throughput / manifest["predicted_samples_per_s"]))
    return tuple(errors)


def read_end(run: RunDirectory) -> tuple[str, str]:
    """Return FAILED or STOPPED and the error with which the csdctl of `run` ended. '' without an error."""
    end = load_kept(run.process, dict[str, Any]) or {}
    return str(end.get("state", "")), str(end.get("error", ""))


@dataclass(frozen=True)
class RunStatus:
    """A run in a line."""

    run_id: str
    state: str
    """COMPLETED, STOPPED, FAILED, or INTERRUPTED for a run without an end."""
    job: str = ""
    strategy: str = DATA_PARALLEL
    num_ranks: int = 0
    epochs: int = 0
    """Planned number of epochs."""
    epoch: int = 0
    """The one that was trained last, from 1."""
    step: int = 0
    """In that epoch; 0: it has ended."""
    samples_per_s: float | None = None
    """Throughput of the run, as in its report."""
    loss: float | None = None
    accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    last_event_s: float | None = None
    """Unix time."""
    emulated: bool = False
    reason: str = ""
    """As in `RunSummary`."""


def load_run_status(run: RunDirectory) -> RunStatus:
    """Return what is known of `run`. One whose files cannot be read has only its state."""
    try:
        manifest: Any = run.load_manifest()
    except InputError:
        return RunStatus(run.run_id, INTERRUPTED)
    nodes = [rank["node"] for rank in manifest["plan"]["ranks"]]
    tally, followed, last_s = Tally(), _Run(len(nodes)), None
    last: Progress | EpochEnd = followed.last
    for last_s, event in run.read_events(nodes).skim():  # noqa: B007
        tally.add(event)
        followed.add(event)
        if isinstance(event, Progress | EpochEnd) and event.rank == 0:
            last = event
    recipe, job = manifest.get("recipe"), manifest.get("job")  # both may have been edited
    epochs = recipe.get("epochs") if isinstance(recipe, dict) else 0
    return RunStatus(
        run.run_id,
        read_end(run)[0] or followed.state,
        job=str(job.get("path", "")) if isinstance(job, dict) else "",
        strategy=str(manifest.get("strategy", DATA_PARALLEL)),
        num_ranks=len(nodes),
        epochs=epochs if type(epochs) is int else 0,
        epoch=last.epoch,
        step=last.step if isinstance(last, Progress) else 0,
        loss=last.loss,
        accuracy=last.accuracy,
        validation_loss=followed.last.validation_loss,
        validation_accuracy=followed.last.validation_accuracy,
        reason=followed.finished.get(0, ""),
        samples_per_s=tally.ranks[0].throughput,
        last_event_s=last_s,
        emulated=bool(manifest["plan"].get("emulated")),
    )
