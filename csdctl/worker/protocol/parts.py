"""The request to time the parts that a model can be divided into, on one machine."""

from dataclasses import dataclass
from typing import Annotated

from csdctl.worker.protocol.bounds import BatchSize, Between, Seconds
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import Prefix, Runtime, UserCode

PartSeconds = Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True)
class PartsSpec:
    """What to time, with random samples; one line of standard input."""

    architecture: str
    weights: str
    recipe: Recipe
    runtime: Runtime
    data: DatasetInfo
    """The public data set: random samples of its shape and type are used."""
    batch_size: BatchSize
    cuts: tuple[str, ...] = ()
    """The layers behind which the model is cut."""
    prefix: Prefix | None = None
    """The frozen part whose output is computed ahead, if any."""
    code: UserCode | None = None
    min_duration_s: Seconds = 0.5
    """Of each measurement."""


@dataclass(frozen=True)
class CutTimes:
    """Seconds of the parts of a batch, with the model cut behind `layer`."""

    layer: str
    forward_s: PartSeconds
    """Of the prefix."""
    backward_s: PartSeconds
    """Of the prefix."""
    head_s: PartSeconds
    """Forward and backward pass of the head."""


@dataclass(frozen=True)
class PartTimes:
    """Seconds that a batch takes."""

    step_s: PartSeconds
    """Forward and backward pass and the optimizer's step of the whole model."""
    evaluation_s: PartSeconds
    """Forward pass of the whole model, as for validation."""
    features_s: PartSeconds
    """Of the frozen part, as features are computed; 0 if there is none."""
    cuts: tuple[CutTimes, ...]
    """Of the cuts at which the model can be divided."""
    why_not: str = ""
    """Why it cannot be divided at the others."""
