"""The model of one machine class: an immutable value; pure.

Machines of one class share all measurements. The host is a separate class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.measurements import RuntimeSettings
from csdctl.tuning.memory import largest_within_memory, merge_peaks, predict_peak_bytes
from csdctl.tuning.observations import ProbeOutcome
from csdctl.tuning.step_time_fit import Point, fit_step_time

MAX_PROBES = 8
"""Maximum number of probes per class in one tuning."""
OOM_RETRY_SHARE = 0.6
"""After a rank ran out of memory in a trial, it computes this share of the samples at once."""


@dataclass(frozen=True)
class ClassModel:
    """What is known about the machines of one class, with one set of runtime settings."""

    machines: tuple[str, ...]
    settings: RuntimeSettings = field(default_factory=lambda: RuntimeSettings(1))
    points: tuple[Point, ...] = ()
    """Probes with these settings, including those of earlier tunings."""
    in_step_factor: float = 1.0
    """Compute time of a step in a trial, together with other ranks, relative to a probe of the same size."""
    trial_sizes: tuple[int, ...] = ()
    """The batch sizes of the trials from which `in_step_factor` was computed."""
    num_new_probes: int = 0
    max_new_probes: int = MAX_PROBES
    max_size: int | None = None
    """The largest batch size that a plan may give a machine."""
    has_earlier_trial: bool = False
    """Whether an earlier tuning reached its trial, and thus already explored other settings."""
    guess: StepTime | None = None
    """The step time estimated from similar models; used until the first probe."""
    guessed_from: tuple[str, ...] = ()
    """The models that `guess` was estimated from, nearest first."""
    too_large: int | None = None
    """The smallest batch size that did not fit in memory."""
    peaks: Mapping[int, int] = field(default_factory=dict)
    """Peak memory of a process in bytes, by the batch size that it computed at once."""
    memory_bytes: int | None = None
    """Memory that a rank may use; None: unknown."""

    @property
    def sizes(self) -> set[int]:
        """The batch sizes that were probed."""
        return {point.batch_size for point in self.points}

    @property
    def max_at_once(self) -> int | None:
        """The largest batch that fits in memory at once; None: unknown."""
        bounds = []
        if self.memory_bytes and (within := largest_within_memory(self.peaks, self.memory_bytes)):
            bounds.append(max(within, *self.peaks))
        if self.too_large is not None:
            bounds.append(max(1, self.too_large - 1))
        return min(bounds, default=None)

    def cap(self, size: int) -> int:
        """Return `size`, limited to the largest that a plan may give."""
        return size if self.max_size is None else min(size, self.max_size)

    def limit_at_once(self, size: int) -> int:
        """Return how many of `size` samples a machine computes at once."""
        return min(size, self.max_at_once or size)

    def step_time_at_once(self) -> StepTime | None:
        """Return the step time in training of batches that fit in memory; None without probes or a guess."""
        return fit_step_time(self.points).scaled(self.in_step_factor) if self.points else self.guess

    def step_time(self) -> StepTime:
        """Return the step time in training; batches that exceed the memory are computed in micro-batches.

        Raises ValueError without a probe or a guess.
        """
        fitted = self.step_time_at_once()
        if fitted is None:
            raise ValueError(f"the step time of {', '.join(self.machines)} is unknown")
        at_once = self.max_at_once
        if at_once is None:
            return fitted
        micro_batched_s = fitted.at(at_once) / at_once
        if fitted.knee is not None and fitted.above_knee_s is not None and fitted.knee < at_once:
            above_knee_s = max(fitted.above_knee_s, micro_batched_s)
            return StepTime(fitted.fixed_s, fitted.per_sample_s, fitted.knee, above_knee_s)
        return StepTime(fitted.fixed_s, fitted.per_sample_s, at_once, micro_batched_s)

    def predict_peak_bytes(self, batch_size: int) -> int | None:
        """Return the peak memory of a rank with `batch_size`; None: too few measurements."""
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

    def with_settings(self, settings: RuntimeSettings, time_ratio: float) -> "ClassModel":
        """Return the model with other settings; step times are multiplied by `time_ratio`."""
        points = tuple(Point(point.batch_size, point.step_time_s * time_ratio) for point in self.points)
        return replace(self, settings=settings, points=points)

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
