"""Measurements of a model on one machine: of a step, and of parts."""

from dataclasses import dataclass
from typing import Annotated

from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import BatchSize, Between, Count, NumSteps, Seconds
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import Prefix, Runtime, UserCode

PartSeconds = Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True)
class PartsSpec:
    """A request to time a model's parts with random samples. One line of standard input."""

    architecture: str
    weights: str
    recipe: Recipe
    runtime: Runtime
    data: DatasetInfo
    """The public data set: random samples of its shape and type are used."""
    batch_size: BatchSize
    cuts: tuple[str, ...] = ()
    prefix: Prefix | None = None
    """The frozen part whose output is computed ahead, if any."""
    code: UserCode | None = None
    min_duration_s: Seconds = 0.5


@dataclass(frozen=True)
class CutTimes:
    """Seconds of the parts of a batch, with the model cut behind `layer`."""

    layer: str
    forward_s: PartSeconds
    backward_s: PartSeconds
    head_s: PartSeconds


@dataclass(frozen=True)
class PartTimes:
    """Seconds that a batch takes."""

    step_s: PartSeconds
    """Forward and backward pass and the optimizer's step of the whole model."""
    evaluation_s: PartSeconds
    """Forward pass of the whole model, as for validation."""
    features_s: PartSeconds
    """The seconds of the frozen part, as features are computed; 0 if there is none."""
    cuts: tuple[CutTimes, ...]
    why_not: str = ""
    """Why it cannot be divided at the others."""


@dataclass(frozen=True)
class ProbeRequest:
    """Measure one batch size, for at least `min_steps` steps and `min_duration_s` seconds."""

    batch_size: BatchSize
    min_steps: NumSteps = 3
    min_duration_s: Seconds = 1.0
    warm_up_steps: Count = 2
    """Steps before the measurement: the first step of a size allocates memory and selects kernels."""
