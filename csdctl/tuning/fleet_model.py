"""The model of the fleet: immutable values that each round of tuning replaces by new ones. Pure.

Machines of one class share all measurements. The host is a separate class. Earlier measurements are the start
of a new tuning.

The time of a step and the cost of a sum are fitted to measurements. A probe's error is proportional to its
time, so residuals are relative. A single disturbed probe must not change the fit, so large residuals weigh
less (Huber's weights, reweighted until they converge).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import CollectiveCost, StepTime, calibrate_overhead
from csdctl.tuning.measurements import CollectiveMeasurement, Point, ProbeMeasurement, TrialMeasurement
from csdctl.tuning.plan import RankPlan
from csdctl.tuning.search import BestPlan
from csdctl.worker.protocol.run_spec import Runtime

Array = Any
"""A NumPy array of float64; NumPy is imported where it computes: a host that manages a fleet needs none."""

HUBER_K = 1.345
"""Residuals beyond this many standard deviations weigh less; 95% efficient where none is an outlier."""
MIN_SCALE = 0.01
"""Minimum noise for the weights of residuals."""
MAD_TO_SIGMA = 1.4826
NUM_REWEIGHTS = 20
MIN_GROWTH = 0.05
"""By which share a step grows up to the largest probed batch, where noise hides it."""


NUM_NEWEST = 5
RANK_SHARE = 0.9
SPREAD = 2.0
MAX_PROBES = 8
OOM_RETRY_SHARE = 0.6
OUTLIER_TOLERANCE = 0.1


def fit_step_time(probes: Sequence[Point]) -> StepTime:
    """Fit the step time to `probes` of one machine class. Raises ValueError without probes.

    A single batch size gives a line through the origin. Times that do not grow with the batch, a flat line.
    """
    import numpy as np

    if not probes:
        raise ValueError("no probe to fit a step time to")
    sizes = np.array([float(probe.batch_size) for probe in probes])
    times = np.array([probe.step_time_s for probe in probes])
    line = _fit(np.stack([np.ones_like(sizes), sizes], axis=1), times)
    if len({probe.batch_size for probe in probes}) == 1:  # it does not determine α
        return StepTime(0.0, _fit(sizes[:, np.newaxis], times)[0])
    if line[1] <= 0:  # steps that get shorter with the batch: α is most of them, and the rest is noise
        fixed_s = _fit(np.ones((len(sizes), 1)), times)[0]
        return StepTime(fixed_s, MIN_GROWTH * fixed_s / max(probe.batch_size for probe in probes))
    return StepTime(line[0], line[1])


def _fit(columns: Array, times: Array) -> list[float]:
    """Return the coefficients ≥ 0 of `columns`."""
    import numpy as np

    weights, fitted = np.ones_like(times), times
    coefficients: list[float] = []
    for _ in range(NUM_REWEIGHTS):
        # Relative to the fit, not to the probe: otherwise fast probes weigh more and the fit is too fast.
        roots = np.sqrt(weights) / fitted
        coefficients = non_negative(columns * roots[:, np.newaxis], times * roots)
        before, fitted = fitted, columns @ np.array(coefficients)
        residuals = times / fitted - 1
        scale = max(MIN_SCALE, MAD_TO_SIGMA * median(np.abs(residuals).tolist()))
        weights = np.minimum(1.0, HUBER_K * scale / np.maximum(np.abs(residuals), 1e-12))
        if np.allclose(before, fitted, rtol=1e-4):
            break
    return coefficients


def non_negative(columns: Array, wanted: Array) -> list[float]:
    """Solve least squares with coefficients ≥ 0: drop the first negative coefficient until none is left."""
    import numpy as np

    kept = list(range(columns.shape[1]))
    while True:
        solved = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)[0]
        negative = [column for column, value in zip(kept, solved, strict=True) if value < 0]
        if not negative:
            coefficients = dict(zip(kept, solved, strict=True))
            return [float(coefficients.get(column, 0.0)) for column in range(columns.shape[1])]
        kept.remove(negative[0])


"""Number of newest times used per sum: a fleet changes, and a single time may be an outlier."""


def fit_collective(measured: Sequence[CollectiveMeasurement]) -> CollectiveCost:
    """Fit the cost of a sum to `measured`, minimizing relative errors. 0 without measurements."""
    seconds = _median_times(measured)
    if not seconds:
        return CollectiveCost()
    import numpy as np

    rows = [[1.0, others := num_ranks - 1, num_bytes, num_bytes * others] for num_ranks, num_bytes in seconds]
    times = np.array(list(seconds.values()))
    columns = np.array(rows, float) / times[:, np.newaxis]
    # Bytes are millions and seconds thousandths: scale each column for numerical stability.
    sizes = np.abs(columns).max(axis=0)
    sizes[sizes == 0] = 1.0
    coefficients = np.array(non_negative(columns / sizes, np.ones_like(times))) / sizes
    return CollectiveCost(*map(float, coefficients))


def _median_times(measured: Sequence[CollectiveMeasurement]) -> dict[tuple[int, int], float]:
    """Return the median seconds of the newest sums, by ranks and bytes."""
    repeated: dict[tuple[int, int], list[float]] = {}
    for sample in sorted(measured, key=lambda sample: sample.measured_at):
        if sample.num_ranks > 1 and sample.seconds > 0:  # a single rank has nothing to sum
            repeated.setdefault((sample.num_ranks, sample.num_bytes), []).append(sample.seconds)
    return {key: median(seconds[-NUM_NEWEST:]) for key, seconds in repeated.items()}


"""The share of a machine's usable memory that a rank's predicted peak may take."""
"""Two sizes that differ by less than this factor show noise rather than the cost of a sample."""


def rank_memory_bytes(usable_bytes: int | None) -> int | None:
    """Return the part of a machine's usable memory that a rank may use. None: unknown."""
    return int(usable_bytes * RANK_SHARE) if usable_bytes else None


def merge_peaks(peaks: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
    """Return the larger peak for each batch size."""
    return {**peaks, **{size: max(peak, peaks.get(size, 0)) for size, peak in more.items()}}


def predict_peak_bytes(peaks: Mapping[int, int], batch_size: int) -> int | None:
    """Extrapolate the peak at `batch_size` from the largest size and the largest size up to half of it.

    `peaks` maps batch size to peak memory in bytes. Return None with fewer than two sizes. A smaller size
    gets the peak of the largest: the peak memory of a process never falls.
    """
    if batch_size in peaks:
        return peaks[batch_size]
    if len(peaks) < 2:
        return None
    largest, slope = _line(peaks)
    return int(peaks[largest] + max(0.0, slope) * max(0, batch_size - largest))


def largest_within_memory(peaks: Mapping[int, int], memory_bytes: int) -> int | None:
    """Return the largest batch size whose predicted peak is at most `memory_bytes`. None without peaks.

    A peak grows at most in proportion to the batch size. Without two sizes, that is assumed.
    """
    if not peaks:
        return None
    largest, slope = _line(peaks) if len(peaks) > 1 else (max(peaks), 0.0)
    if slope <= 0:
        return max(1, largest * memory_bytes // peaks[largest])
    return max(1, int(largest + (memory_bytes - peaks[largest]) / slope))


def _line(peaks: Mapping[int, int]) -> tuple[int, float]:
    """Return the largest batch size, and the bytes per sample between it and a smaller size."""
    largest = max(peaks)
    small = max((size for size in peaks if size * SPREAD <= largest), default=min(peaks))
    return largest, (peaks[largest] - peaks[small]) / (largest - small)


@dataclass(frozen=True)
class ProbeOutcome:
    """One batch size, probed on one machine."""

    batch_size: int
    step_time_s: float | None
    """Mean of forward, backward and apply; None: the batch did not fit in memory."""
    num_steps: int = 0
    peaks: Mapping[int, int] = field(default_factory=dict)
    """Peak memory in bytes by batch size, for every size that raised the peak of this probe process."""
    is_oom_kill: bool = False
    """Whether the process was killed at this size; False without a step time: it was predicted not to fit."""

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second. None when the batch did not fit in memory."""
        return self.batch_size / self.step_time_s if self.step_time_s else None

    @property
    def peak_memory_bytes(self) -> int:
        """The peak at this batch size. 0: an earlier, larger size had set it."""
        return self.peaks.get(self.batch_size, 0)


@dataclass(frozen=True)
class TrialResult:
    """The steps of a trial. Sequences are in order of rank."""

    num_steps: int
    step_s: float
    """Seconds from one step of the fleet to the next."""
    samples_per_s: float
    compute_s: tuple[float, ...]
    """Compute seconds of each rank in a step."""
    wall_s: float
    """Seconds of all steps, including those that are not counted."""
    sum_s: float
    """Seconds of the sums of one step over these ranks, measured before the first step."""
    peak_memory_bytes: tuple[int | None, ...] = ()
    """Peak memory of each rank's process; None where it was not reported."""
    error: float = 0.0
    """The relative standard error of `step_s`."""


@dataclass(frozen=True)
class TriedPlan:
    """A plan and the result of its trial."""

    best: BestPlan
    ranks: tuple[RankPlan, ...]
    """The host first, with batch size 0 when it does not train."""
    result: TrialResult

    @property
    def compute_s(self) -> dict[str, float]:
        """Seconds each machine computed in a step."""
        return {rank.node: seconds for rank, seconds in zip(self.ranks, self.result.compute_s, strict=True)}


"""Maximum number of probes per class in one tuning."""
"""After a rank ran out of memory in a trial, it computes this share of the samples at once."""


@dataclass(frozen=True)
class ClassModel:
    """The measured properties of the machines of one class, with one set of runtime settings."""

    machines: tuple[str, ...]
    settings: Runtime = field(default_factory=lambda: Runtime(1))
    points: tuple[Point, ...] = ()
    """Probes with these settings, including those of earlier tunings."""
    in_step_factor: float = 1.0
    """Compute time of a step in a trial, together with other ranks, relative to a probe of the same size."""
    trial_sizes: tuple[int, ...] = ()
    """The batch sizes of the trials from which `in_step_factor` was computed."""
    num_new_probes: int = 0
    max_size: int | None = None
    """The largest batch size that a plan may give a machine."""
    too_large: int | None = None
    """The smallest batch size that did not fit in memory."""
    peaks: Mapping[int, int] = field(default_factory=dict)
    """Peak memory of a process in bytes, by the batch size that it computed at once."""
    memory_bytes: int | None = None
    """Memory that a rank may use; None: unknown."""
    is_divisible: bool = True
    """Whether a batch that exceeds the memory can be computed in micro-batches."""

    @property
    def sizes(self) -> set[int]:
        """The batch sizes that were probed."""
        return {point.batch_size for point in self.points}

    @property
    def max_at_once(self) -> int | None:
        """The largest batch that fits in memory at once. None: unknown."""
        bounds = []
        if self.memory_bytes and (within := largest_within_memory(self.peaks, self.memory_bytes)):
            bounds.append(max(within, *self.peaks))
        if self.too_large is not None:
            bounds.append(max(1, self.too_large - 1))
        return min(bounds, default=None)

    def cap(self, size: int) -> int:
        """Return `size`, limited to the largest that a plan may give."""
        at_once = None if self.is_divisible else self.max_at_once
        return min([size, *filter(None, (self.max_size, at_once))])

    def limit_at_once(self, size: int) -> int:
        """Return how many of `size` samples a machine computes at once."""
        return min(size, self.max_at_once or size)

    def step_time_at_once(self) -> StepTime:
        """Return the step time in training of batches that fit in memory.

        Raises ValueError without probes.
        """
        return fit_step_time(self.points).scaled(self.in_step_factor)

    def step_time(self) -> StepTime:
        """Return the step time in training. Batches that exceed the memory are computed in micro-batches.

        Raises ValueError without probes.
        """
        fitted = self.step_time_at_once()
        at_once = self.max_at_once
        if at_once is None:
            return fitted
        if not self.is_divisible:
            return replace(fitted, largest=at_once)
        micro_batched_s = fitted.at(at_once) / at_once
        return StepTime(fitted.fixed_s, fitted.per_sample_s, at_once, micro_batched_s)

    def predict_peak_bytes(self, batch_size: int) -> int | None:
        """Return the peak memory of a rank with `batch_size`. None: too few measurements."""
        return predict_peak_bytes(self.peaks, self.limit_at_once(batch_size))

    def with_probes(self, outcomes: Sequence[ProbeOutcome]) -> "ClassModel":
        """Return the model updated with the outcomes of probes with its settings."""
        points, peaks, too_large = list(self.points), self.peaks, self.too_large
        for outcome in outcomes:
            peaks = merge_peaks(peaks, outcome.peaks)
            if outcome.step_time_s is None:
                too_large = min(outcome.batch_size, too_large or outcome.batch_size)
            else:
                points.append(Point(outcome.batch_size, outcome.step_time_s))
        if too_large and max((point.batch_size for point in points), default=0) >= too_large:
            too_large = None  # a larger batch fitted: the process was killed for another reason
        return replace(
            self,
            points=tuple(points),
            peaks=peaks,
            too_large=too_large,
            num_new_probes=self.num_new_probes + len(outcomes),
        )

    def with_trial(self, size: int, ratio: float) -> "ClassModel":
        """Return the model updated with a trial: steps of `size` took `ratio` times as long as modelled.

        All trials have the same weight.
        """
        sizes = (*self.trial_sizes, size)
        factor = self.in_step_factor * ratio ** (1 / len(sizes))
        return replace(self, trial_sizes=sizes, in_step_factor=factor)

    def with_out_of_memory(self, batch_size: int) -> "ClassModel":
        """Return the model after a rank ran out of memory in a trial: it computes smaller micro-batches."""
        return replace(self, too_large=max(2, round(self.limit_at_once(batch_size) * OOM_RETRY_SHARE)))


@dataclass(frozen=True)
class FleetModel:
    """Step times of the fleet's machines, alone and together."""

    machines: tuple[str, ...]
    """The machines that train, in the order of the fleet; the host first unless it does not train."""
    classes: Mapping[str, ClassModel]
    """Machine classes by name: 'host', or the key of the class of nodes."""
    vector_bytes: int = 0
    """Bytes that each rank contributes to a sum."""
    required: frozenset[str] = frozenset()
    """Machines that every plan must include: the host, and nodes with private data."""
    private_shares: Mapping[str, float] = field(default_factory=dict)
    """The part of all samples that are private ones of a machine, by machine."""
    collective_cost: CollectiveCost = field(default_factory=CollectiveCost)
    overhead_factor: float = 1.0
    """Time of a step without the sum, relative to the compute time of its slowest rank."""
    outlier_factors: Mapping[str, float] = field(default_factory=dict)
    """Step time relative to the machine class, of machines that differ from it."""

    @property
    def is_host_training(self) -> bool:
        """Whether the host may train. It is a rank in either case."""
        return self.machines[0] == HOST_NAME

    def class_name(self, machine: str) -> str:
        """Return the name of the class that `machine` belongs to."""
        return next(name for name, known in self.classes.items() if machine in known.machines)

    def class_of(self, machine: str) -> ClassModel:
        """Return the class that `machine` belongs to."""
        return self.classes[self.class_name(machine)]

    def with_class(self, name: str, changed: ClassModel) -> "FleetModel":
        """Return the model with class `name` replaced."""
        return replace(self, classes={**self.classes, name: changed})

    def step_times(self) -> dict[str, StepTime]:
        """Return the step time of each class. Raises ValueError when one is unknown."""
        return {name: known.step_time() for name, known in self.classes.items()}

    def machine_step_times(self, step_times: Mapping[str, StepTime] | None = None) -> dict[str, StepTime]:
        """Return the step time of each machine from those of the classes, in the order of the fleet."""
        by_class = self.step_times() if step_times is None else step_times
        by_machine = {
            machine: by_class[name] for name, known in self.classes.items() for machine in known.machines
        }
        return {
            machine: by_machine[machine].scaled(self.outlier_factors.get(machine, 1.0))
            for machine in self.machines
        }

    def sum_s(self, num_ranks: int) -> float:
        """Return the seconds of a sum over `num_ranks`."""
        return self.collective_cost.at(self.vector_bytes, num_ranks)

    def sum_s_of_training(self, num_training: int) -> float:
        """Return the seconds of a sum when `num_training` machines train. The host always takes part."""
        return self.sum_s(num_training + (not self.is_host_training))


"""A machine that differs from its class by more than this share in a trial gets a separate step time."""


def learn_probes(model: FleetModel, outcomes: Mapping[str, ProbeOutcome]) -> FleetModel:
    """Return the model updated with one round of probes, by machine, with the settings of its class."""
    classes = {
        name: known.with_probes([outcomes[machine] for machine in known.machines if machine in outcomes])
        for name, known in model.classes.items()
    }
    return replace(model, classes=classes)


def learn_trial(model: FleetModel, tried: TriedPlan) -> FleetModel:
    """Return the model updated with a trial: in-step factors of classes, outliers, and step overhead."""
    compute_s, sizes = tried.compute_s, tried.best.batch_sizes
    classes, outliers = dict(model.classes), dict(model.outlier_factors)
    for name, known in model.classes.items():
        step_time = known.step_time()
        training = [machine for machine in known.machines if machine in sizes]
        if not training:
            continue
        ratios = {machine: compute_s[machine] / step_time.at(sizes[machine]) for machine in training}
        usual = median(ratios.values())
        classes[name] = known.with_trial(max(sizes[machine] for machine in training), usual)
        for machine, ratio in ratios.items():
            outliers[machine] = ratio / usual if abs(ratio / usual - 1) > OUTLIER_TOLERANCE else 1.0
    learned = replace(model, classes=classes, outlier_factors=outliers)
    step_times = learned.machine_step_times()
    ranks = [(step_times[machine], size) for machine, size in sizes.items()]
    sum_s = model.sum_s(len(tried.ranks))
    return replace(learned, overhead_factor=calibrate_overhead(ranks, tried.result.step_s, sum_s))


RecalledTrial = tuple[Sequence[tuple[StepTime, int]], float]
"""Step time and batch size of each rank, the host first, and the seconds of a step."""


def recall_class(blank: ClassModel, known: Sequence[ProbeMeasurement], threads: int = 0) -> ClassModel:
    """Return `blank` with the `known` probes of this model, recipe and machine class, oldest first.

    Settings are those of the newest trial, with `threads` if the user set that (0: not set). Probes with
    other settings do not count.
    """
    known = [probe for probe in known if probe.settings.device == blank.settings.device]
    tried = [probe for probe in known if probe.is_from_trial and threads in (0, probe.settings.threads)]
    blank = replace(blank, settings=tried[-1].settings) if tried else blank
    known = [probe for probe in known if probe.settings == blank.settings]
    too_large, peaks = _recall_memory(known)
    points = [
        Point(probe.batch_size, probe.step_time_s)
        for probe in known
        if probe.step_time_s is not None and not probe.is_from_trial
    ]
    recalled = replace(blank, too_large=too_large, peaks=peaks, points=tuple(points))
    # An interrupted tuning has probes but no trial.
    shown = recall_in_step(known, fit_step_time(points)) if points else None
    return recalled.with_trial(*shown) if shown else recalled


def recall_trial(
    trials: Sequence[TrialMeasurement], step_times: Mapping[str, StepTime]
) -> RecalledTrial | None:
    """Return the newest of `trials`, oldest first, of several ranks. `step_times` by class name.

    None without such a trial, or when it has a class that is not in `step_times`.
    """
    of_several = [trial for trial in trials if len(trial.ranks) > 1]
    if not of_several:
        return None
    host, *nodes = of_several[-1].ranks
    ranks = [(HOST_NAME, host.batch_size), *((rank.machine_class, rank.batch_size) for rank in nodes)]
    if any(size and name not in step_times for name, size in ranks):
        return None
    # An idle rank computes nothing, but takes part in the sum; its step time does not matter.
    any_step_time = next(iter(step_times.values()))
    return [(step_times.get(name, any_step_time), size) for name, size in ranks], of_several[-1].step_s


def recall_in_step(known: Sequence[ProbeMeasurement], step_time: StepTime) -> tuple[int, float] | None:
    """Return a batch size of the newest trial and its time relative to `step_time`. None without a trial."""
    tried = [probe for probe in known if probe.is_from_trial]
    if not tried:
        return None
    newest = max(probe.measured_at for probe in tried)
    shown = [probe for probe in tried if probe.measured_at == newest]
    ratio = median(
        probe.step_time_s / step_time.at(probe.batch_size) for probe in shown if probe.step_time_s is not None
    )
    return max(probe.batch_size for probe in shown), ratio


def _recall_memory(known: Sequence[ProbeMeasurement]) -> tuple[int | None, dict[int, int]]:
    """Return the smallest size that did not fit in memory, and the peaks of the sizes that did."""
    too_large: int | None = None
    peaks: dict[int, int] = {}
    for probe in known:
        if probe.step_time_s is None:
            too_large = min(probe.batch_size, too_large or probe.batch_size)
        elif probe.peak_memory_bytes:
            peaks = merge_peaks(peaks, {probe.batch_size: probe.peak_memory_bytes})
            if too_large and probe.batch_size >= too_large:
                too_large = None  # another process had used the memory at that time
    return too_large, peaks
