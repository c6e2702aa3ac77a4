"""Measurements as values, as stored and as used by tuning. Pure: the caller passes their time."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from csdctl.perfmodel.spread import MODELLED_SIGMA, TRIED_SIGMA, Spread, estimate_spread
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.recipe import BF16
from csdctl.worker.protocol.run_spec import Runtime

NUMBER_BYTES, HALVED_BYTES = 4, 2
"""Bytes of a number in a gradient that is sent as float32, and as bfloat16."""
Number = Annotated[int, Field(ge=0, le=1 << 50)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Positive = Annotated[float, Field(ge=1e-9, le=1e15)]
"""What a stored line may have. Others are damaged."""


@dataclass(frozen=True)
class ModelProperties:
    """A model, and the properties that determine its step time."""

    hash: str
    """Hash of the architecture. Weights do not affect the step time."""
    name: str
    vector_bytes: int = 0
    """Bytes that each rank contributes to a sum, without the few numbers sent with the gradient."""
    is_divisible: bool = True
    """Whether a batch can be computed in micro-batches."""


@dataclass(frozen=True)
class Point:
    """One measurement: the mean step of a machine at one batch size."""

    batch_size: int
    step_time_s: float

    @property
    def samples_per_s(self) -> float:
        """Samples per second at this batch size."""
        return self.batch_size / self.step_time_s


@dataclass(frozen=True)
class ProbeOutcome:
    """One batch size, measured on one machine."""

    batch_size: Number
    step_time_s: Seconds | None
    """Mean of forward, backward and apply. None: the batch did not fit in memory."""
    peak_memory_bytes: Number | None = 0
    """Peak of the process at this batch size. 0: an earlier, larger size had set it. None: unknown."""
    is_oom_kill: bool = False
    """Whether the process was killed at this size. False without a time: it was predicted not to fit."""


@dataclass(frozen=True, kw_only=True)
class ProbeMeasurement(ProbeOutcome):
    """A probe, or a rank's step in a trial, as it is stored."""

    settings: Runtime
    measured_at: float
    """Unix time."""
    node: str = ""
    """The machine that was measured. '' in measurements of earlier versions."""
    factor: Positive = 1.0
    """Its step time relative to its class, by which `step_time_s` was divided."""

    @property
    def is_from_trial(self) -> bool:
        """Whether it is a rank's step in a trial, for which no peak is measured."""
        return self.step_time_s is not None and self.batch_size > 0 and self.peak_memory_bytes is None


@dataclass(frozen=True)
class CollectiveMeasurement:
    """One timed sum over the ranks of a fleet."""

    num_ranks: Number
    num_bytes: Number
    """Size of one rank's vector."""
    seconds: Seconds
    measured_at: float
    """Unix time."""


@dataclass(frozen=True)
class TrialRank:
    """One rank of a trial."""

    machine_class: str
    batch_size: Number
    settings: Runtime
    factor: Positive = field(default=1.0, compare=False)
    """The machine's step time relative to its class."""


@dataclass(frozen=True)
class TrialMeasurement:
    """A plan that the whole fleet ran for a few steps."""

    ranks: tuple[TrialRank, ...]
    """The host first."""
    step_s: Positive
    samples_per_s: Positive
    measured_at: float
    """Unix time."""
    predicted_samples_per_s: Positive | None = None
    """Predicted before the trial. None: no prediction."""


@dataclass(frozen=True)
class ForecastErrors:
    """Errors of earlier forecasts: logarithms of the achieved rate over the forecast rate."""

    tried: tuple[float, ...] = ()
    """Errors for plans that had been tried: another trial, or a run, against the trial before it."""
    modelled: tuple[float, ...] = ()
    """Errors for plans that had only been modelled."""

    @property
    def spread(self) -> Spread:
        """The spread of a forecast of a plan that was not tried: errors of the model, and changes since."""
        model, drift = estimate_spread(self.modelled, MODELLED_SIGMA), self.after_trial(0.0)
        return Spread(model.variance + drift.variance, min(model.num_degrees, drift.num_degrees))

    def after_trial(self, trial_error: float) -> Spread:
        """Return the spread of a forecast from a trial with this relative standard error."""
        return estimate_spread(self.tried, TRIED_SIGMA, trial_error)


def compare_trials(trials: Sequence[TrialMeasurement]) -> ForecastErrors:
    """Return the errors of the forecasts for `trials`, oldest first.

    The first forecast does not count: no trial had corrected its model.
    """
    latest: dict[tuple[TrialRank, ...], float] = {}
    tried, modelled = [], []
    for trial in trials:
        if trial.ranks in latest:
            tried.append(math.log(trial.samples_per_s / latest[trial.ranks]))
        elif latest and trial.predicted_samples_per_s:
            modelled.append(math.log(trial.samples_per_s / trial.predicted_samples_per_s))
        latest[trial.ranks] = trial.samples_per_s
    return ForecastErrors(tuple(tried), tuple(modelled))


def describe_model(info: ModelInfo, architecture_hash: str, code_hash: str = "") -> ModelProperties:
    """Return the properties of a built model. `architecture_hash`: hash of its architecture.json.

    `code_hash`: hash of the job's own code, if the model needs it. For a model that this code builds on every
    rank, architecture.json has the recipe in place of layers.
    """
    identity = architecture_hash
    if code_hash:
        numbers = f"{info.num_parameters} {info.num_trainable} {info.num_operations}"
        parts = [info.name if info.has_own_step else architecture_hash, numbers, code_hash]
        identity = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    number_bytes = HALVED_BYTES if info.recipe.compression == BF16 else NUMBER_BYTES
    vector_bytes = number_bytes * info.num_trainable
    return ModelProperties(identity, info.name, vector_bytes, is_divisible=not info.has_own_step)
