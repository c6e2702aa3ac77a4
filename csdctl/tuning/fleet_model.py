"""The model of the fleet: immutable values that each round of tuning replaces by new ones. Pure.

Machines of one class share all measurements. The host is a separate class. Earlier measurements are the start
of a new tuning.

The time of a step and the cost of a sum are fitted to measurements. A probe's error is proportional to its
time, so residuals are relative. A single disturbed probe must not change the fit, so large residuals weigh
less (Huber's weights, reweighted until they converge).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import CollectiveCost, RankModel, StepTime, calibrate_overhead
from csdctl.tuning import measurements, plan, search
from csdctl.tuning import measurements as measured
from csdctl.worker.protocol.run_spec import Runtime

Array = Any
"""A NumPy array of float64. NumPy is imported where it computes, because managing a fleet needs none."""

HUBER_K = 1.345
"""Residuals beyond this many standard deviations weigh less. 95% efficient where none is an outlier."""
MIN_SCALE = 0.01
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution, relative to its median absolute deviation."""
NUM_REWEIGHTS = 20
MIN_GROWTH = 0.05
"""By which share a step grows up to the largest probed batch, where noise hides the growth."""
NUM_NEWEST = 5
"""Number of newest times used per sum: a fleet changes, and a single time may be an outlier."""
RANK_SHARE = 0.9
"""The share of a machine's usable memory that a rank's predicted peak may take."""
SPREAD = 2.0
"""Two sizes that differ by less than this factor show noise rather than the cost of a sample."""
OOM_RETRY_SHARE = 0.6
"""After a rank ran out of memory in a trial, it computes this share of the samples at once."""
OUTLIER_TOLERANCE = 0.1
"""A machine that differs from its class by more than this share gets a separate step time."""


def fit_step_time(probes: Sequence[measurements.Point]) -> StepTime:
    """Fit the step time to `probes` of one machine class. Raises ValueError for no probes.

    One batch size gives a line through the origin. Times that do not grow with the batch give a flat line.
    """
    import numpy as np

    if not probes:
        raise ValueError("no probe to fit a step time to")
    sizes = np.array([float(probe.batch_size) for probe in probes])
    times = np.array([probe.step_time_s for probe in probes])
    if len({probe.batch_size for probe in probes}) == 1:  # it does not determine α
        return StepTime(0.0, _fit(sizes[:, np.newaxis], times)[0])
    fixed_s, per_sample_s = _fit(np.stack([np.ones_like(sizes), sizes], axis=1), times)
    if per_sample_s <= 0:  # steps that get shorter with the batch: α is most of them, and noise hides β
        fixed_s = _fit(np.ones((len(sizes), 1)), times)[0]
        per_sample_s = MIN_GROWTH * fixed_s / max(probe.batch_size for probe in probes)
    return StepTime(fixed_s, per_sample_s)


def _fit(columns: Array, times: Array) -> list[float]:
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


def non_negative(columns: Array, targets: Array) -> list[float]:
    """Solve least squares with coefficients ≥ 0: drop the first negative coefficient until none remains."""
    import numpy as np

    kept = list(range(columns.shape[1]))
    while True:
        solved = np.linalg.lstsq(columns[:, kept], targets, rcond=None)[0]
        negative = [column for column, value in zip(kept, solved, strict=True) if value < 0]
        if not negative:
            coefficients = dict(zip(kept, solved, strict=True))
            return [float(coefficients.get(column, 0.0)) for column in range(columns.shape[1])]
        kept.remove(negative[0])


def fit_collective(sums: Sequence[measured.CollectiveMeasurement]) -> CollectiveCost:
    """Fit the cost of a sum to timed `sums`, minimizing relative errors. 0 without measurements.

    Of repeated sums over equally many ranks and bytes, the median of the newest counts.
    """
    repeated = defaultdict[tuple[int, int], list[float]](list)
    for timed in sorted(sums, key=lambda timed: timed.measured_at):
        if timed.num_ranks > 1 and timed.seconds > 0:  # a single rank has nothing to sum
            repeated[timed.num_ranks, timed.num_bytes].append(timed.seconds)
    if not repeated:
        return CollectiveCost()
    import numpy as np

    rows = [[1.0, num_ranks - 1, num_bytes, num_bytes * (num_ranks - 1)] for num_ranks, num_bytes in repeated]
    times = np.array([median(seconds[-NUM_NEWEST:]) for seconds in repeated.values()])
    columns = np.array(rows, float) / times[:, np.newaxis]
    # Bytes are millions and seconds thousandths: scale each column for numerical stability.
    scales = np.abs(columns).max(axis=0)
    scales[scales == 0] = 1.0
    coefficients = np.array(non_negative(columns / scales, np.ones_like(times))) / scales
    return CollectiveCost(*map(float, coefficients))


def rank_memory_bytes(usable_bytes: int | None) -> int | None:
    """Return the part of a machine's usable memory that a rank may use. None: unknown."""
    return int(usable_bytes * RANK_SHARE) if usable_bytes else None


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
class TrialResult:
    """The steps of a trial. Sequences are in order of rank."""

    step_s: float
    """Seconds from one step of the fleet to the next."""
    samples_per_s: float
    compute_s: tuple[float, ...]
    """Compute seconds of each rank in a step."""
    sum_s: float
    """Seconds of the sums of one step over these ranks, measured before the first step."""
    peak_memory_bytes: tuple[int | None, ...] = ()
    """Peak memory of each rank's process. None where it was not reported."""
    error: float = 0.0
    """The relative standard error of `step_s`."""
    save_s: float = 0.0
    """Seconds of a checkpoint. 0 where it was not measured."""


@dataclass(frozen=True)
class TriedPlan:
    """A plan and the result of its trial."""

    best: search.BestPlan
    ranks: tuple[plan.RankPlan, ...]
    """The host first, with batch size 0 when it does not train."""
    result: TrialResult

    @property
    def compute_s(self) -> dict[str, float]:
        """Seconds each machine computed in a step."""
        return {rank.node: seconds for rank, seconds in zip(self.ranks, self.result.compute_s, strict=True)}


@dataclass(frozen=True)
class ClassModel:
    """The measured properties of the machines of one class, with one set of runtime settings."""

    machines: tuple[str, ...]
    settings: Runtime = field(default_factory=Runtime)
    points: tuple[measurements.Point, ...] = ()
    """Probes with these settings, including probes of earlier tunings."""
    in_step_factor: float = 1.0
    """Compute time of a step in a trial, together with other ranks, relative to a probe of the same size."""
    trial_sizes: tuple[int, ...] = ()
    """The batch sizes of the trials from which `in_step_factor` was computed."""
    num_new_probes: int = 0
    """Sizes that were probed in this tuning, counted once in each round."""
    too_large: int | None = None
    """The smallest batch size that did not fit in memory."""
    peaks: Mapping[int, int] = field(default_factory=dict)
    """Peak memory of a process in bytes, by the batch size that it computed at once."""
    memory_bytes: int | None = None
    """Memory that a rank may use. None: unknown."""
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
        if self.memory_bytes and (largest := largest_within_memory(self.peaks, self.memory_bytes)):
            bounds.append(max(largest, *self.peaks))
        if self.too_large is not None:
            bounds.append(max(1, self.too_large - 1))
        return min(bounds, default=None)

    def limit_at_once(self, size: int) -> int:
        """Return how many of `size` samples a machine computes at once."""
        return min(size, self.max_at_once or size)

    def step_time(self) -> StepTime:
        """Return the step time in training, beyond the memory in micro-batches. Raises ValueError."""
        fitted, at_once = fit_step_time(self.points).scaled(self.in_step_factor), self.max_at_once
        if at_once is None:
            return fitted
        if not self.is_divisible:
            return replace(fitted, largest=at_once)
        return replace(fitted, knee=at_once, above_knee_s=fitted.at(at_once) / at_once)

    def with_probes(self, outcomes: Sequence[measured.ProbeOutcome]) -> "ClassModel":
        """Return the model updated with the outcomes of probes with its settings."""
        points, peaks, too_large = list(self.points), dict(self.peaks), self.too_large
        for outcome in outcomes:
            size = outcome.batch_size
            if outcome.step_time_s is None:
                too_large = min(size, too_large or size)
                continue
            points.append(measurements.Point(size, outcome.step_time_s))
            if outcome.peak_memory_bytes:
                peaks[size] = max(outcome.peak_memory_bytes, peaks.get(size, 0))
        if too_large and max((point.batch_size for point in points), default=0) >= too_large:
            too_large = None  # a larger batch fitted: the process was killed for another reason
        num_new_probes = self.num_new_probes + len({outcome.batch_size for outcome in outcomes})
        return replace(
            self, points=tuple(points), peaks=peaks, too_large=too_large, num_new_probes=num_new_probes
        )

    def with_trial(self, size: int, ratio: float) -> "ClassModel":
        """Return the model after a trial of `size` took `ratio` times the modelled time. All count alike."""
        sizes = (*self.trial_sizes, size)
        factor = self.in_step_factor * ratio ** (1 / len(sizes))
        return replace(self, trial_sizes=sizes, in_step_factor=factor)

    def with_out_of_memory(self, batch_size: int) -> "ClassModel":
        """Return the model after a rank ran out of memory in a trial: it computes smaller micro-batches."""
        return replace(self, too_large=max(2, round(self.limit_at_once(batch_size) * OOM_RETRY_SHARE)))


@dataclass(frozen=True)
class FleetModel:
    """Step times of the fleet's machines, each by itself and together."""

    machines: tuple[str, ...]
    """The machines that train, in the order of the fleet, with the host first unless it does not train."""
    classes: Mapping[str, ClassModel]
    """Machine classes by name: 'host', or the key of the class of nodes."""
    vector_bytes: int = 0
    """Bytes that each rank contributes to a sum."""
    required: frozenset[str] = frozenset()
    """Machines that every plan must include: the host, and nodes with private data."""
    private_shares: Mapping[str, float] = field(default_factory=dict)
    """The private samples of a machine as a share of all samples, by machine."""
    collective_cost: CollectiveCost = field(default_factory=CollectiveCost)
    overhead_factor: float = 1.0
    """Time of a step without the sum, relative to the compute time of its slowest rank."""
    outlier_factors: Mapping[str, float] = field(default_factory=dict)
    """Step time relative to the machine class, 1 for most. Machines that were not compared are missing."""

    @property
    def is_host_training(self) -> bool:
        """Whether the host may train. It is a rank in either case."""
        return self.machines[0] == HOST_NAME

    def class_name(self, machine: str) -> str:
        """Return the name of the class that `machine` belongs to."""
        return next(name for name, members in self.classes.items() if machine in members.machines)

    def class_of(self, machine: str) -> ClassModel:
        """Return the class that `machine` belongs to."""
        return self.classes[self.class_name(machine)]

    def with_class(self, name: str, changed: ClassModel) -> "FleetModel":
        """Return the model with class `name` replaced."""
        return replace(self, classes={**self.classes, name: changed})

    def step_times(self) -> dict[str, StepTime]:
        """Return the step time of each machine. Raises ValueError when one is unknown."""
        times = dict[str, StepTime]()
        for members in self.classes.values():
            times |= dict.fromkeys(members.machines, members.step_time())
        return {name: times[name].scaled(self.outlier_factors.get(name, 1.0)) for name in self.machines}

    def candidates(self) -> list[RankModel]:
        """Return the machines that may train, in the order of the fleet."""
        return [
            RankModel(
                machine,
                step_time,
                is_required=machine in self.required,
                private_share=self.private_shares.get(machine, 0.0),
            )
            for machine, step_time in self.step_times().items()
        ]

    def sum_s(self, num_ranks: int) -> float:
        """Return the seconds of a sum over `num_ranks`."""
        return self.collective_cost.at(self.vector_bytes, num_ranks)

    def sum_s_of_training(self, num_training: int) -> float:
        """Return the seconds of a sum when `num_training` machines train. The host always takes part."""
        return self.sum_s(num_training + (not self.is_host_training))


def learn_probes(model: FleetModel, outcomes: Mapping[str, measured.ProbeOutcome]) -> FleetModel:
    """Return the model updated with one round of probes, by machine, with the settings of its class.

    Machines of one class that have probed the same size are compared. A machine that cannot be compared, for
    lack of memory, counts as usual.
    """
    classes, factors = dict(model.classes), dict(model.outlier_factors)
    for name, members in model.classes.items():
        probed = {machine: outcomes[machine] for machine in members.machines if machine in outcomes}
        times = {machine: outcome.step_time_s for machine, outcome in probed.items() if outcome.step_time_s}
        if len(probed) == len(members.machines) and len({its.batch_size for its in probed.values()}) == 1:
            usual_times = [times[machine] / factors[machine] for machine in times if machine in factors]
            usual = median(usual_times or times.values() or [1.0])
            factors |= {machine: outlier_factor(times.get(machine, usual) / usual) for machine in probed}
        classes[name] = members.with_probes(
            [
                replace(outcome, step_time_s=times[machine] / factors.get(machine, 1.0))
                if machine in times
                else outcome
                for machine, outcome in probed.items()
            ]
        )
    return replace(model, classes=classes, outlier_factors=factors)


def outlier_factor(ratio: float) -> float:
    """Return the step time of a machine relative to its class: 1 where it differs little."""
    return ratio if abs(ratio - 1) > OUTLIER_TOLERANCE else 1.0


def learn_trial(model: FleetModel, tried: TriedPlan) -> FleetModel:
    """Return the model updated with a trial: in-step factors of classes, outliers, and step overhead."""
    compute_s, sizes = tried.compute_s, tried.best.batch_sizes
    classes, outliers = dict(model.classes), dict(model.outlier_factors)
    for name, members in model.classes.items():
        step_time = members.step_time()
        ratios = {
            machine: compute_s[machine] / step_time.at(sizes[machine])
            for machine in members.machines
            if machine in sizes
        }
        if not ratios:
            continue
        usual = median(ratio / outliers.get(machine, 1.0) for machine, ratio in ratios.items())
        classes[name] = members.with_trial(max(sizes[machine] for machine in ratios), usual)
        for machine, ratio in ratios.items():
            outliers[machine] = outlier_factor(ratio / usual)
    learned = replace(model, classes=classes, outlier_factors=outliers)
    step_times = learned.step_times()
    ranks = [(step_times[machine], size) for machine, size in sizes.items()]
    sum_s = model.sum_s(len(tried.ranks))
    return replace(learned, overhead_factor=calibrate_overhead(ranks, tried.result.step_s, sum_s))


def recall_class(blank: ClassModel, probes: Sequence[measured.ProbeMeasurement]) -> ClassModel:
    """Return `blank` with earlier `probes`, oldest first, of which only those with its settings count."""
    probes = [probe for probe in probes if probe.settings == blank.settings]
    recalled = blank.with_probes([probe for probe in probes if not probe.is_from_trial])
    recalled = replace(recalled, num_new_probes=0)
    tried = [probe for probe in probes if probe.is_from_trial]
    if not recalled.points or not tried:  # an interrupted tuning has probes but no trial
        return recalled
    newest = [probe for probe in tried if probe.measured_at == max(probe.measured_at for probe in tried)]
    step_time = fit_step_time(recalled.points)
    ratios = [(probe.step_time_s or 0.0) / step_time.at(probe.batch_size) for probe in newest]
    return recalled.with_trial(max(probe.batch_size for probe in newest), median(ratios))


def recall_overhead(trials: Sequence[measured.TrialMeasurement], model: FleetModel) -> float | None:
    """Return the overhead factor in the newest of `trials` with several ranks. None if that is unknown."""
    trial = next((trial for trial in reversed(trials) if len(trial.ranks) > 1), None)
    if trial is None:
        return None
    names = [HOST_NAME, *(rank.machine_class for rank in trial.ranks[1:])]
    # An idle host computes nothing, but takes part in the sum.
    training = [(name, rank) for name, rank in zip(names, trial.ranks, strict=True) if rank.batch_size]
    if any(name not in model.classes for name, _ in training):
        return None
    ranks = [
        (model.classes[name].step_time().scaled(rank.factor), rank.batch_size) for name, rank in training
    ]
    return calibrate_overhead(ranks, trial.step_s, model.sum_s(len(trial.ranks)))
