"""What was measured, as values: what the history keeps and tuning reasons from; pure.

A time is given in by the caller: nothing here knows what o'clock it is.
"""

import math
from dataclasses import dataclass

from csdctl.worker.protocol.model_info import ModelInfo

NUMBER_BYTES = 4
"""Gradients travel as float32."""


@dataclass(frozen=True)
class ModelFeatures:
    """A model, and what its step's time depends on. 0: not known."""

    hash: str
    """Of its architecture; weights do not change how long a step takes."""
    name: str
    num_parameters: int = 0
    num_trainable: int = 0
    num_operations: int = 0
    """Floating-point operations of the forward pass for one sample."""
    input_elements: int = 0
    """Numbers that one sample holds, over all inputs."""

    @property
    def vector_bytes(self) -> int:
        """What each rank gives to a sum, but for the few numbers that go with the gradient."""
        return NUMBER_BYTES * self.num_trainable

    @property
    def short_name(self) -> str:
        """Without directories, and without `keras.applications:`."""
        return self.name.removeprefix("keras.applications:").rpartition("/")[2]


@dataclass(frozen=True, order=True)
class RuntimeSettings:
    """How TensorFlow ran while it was measured."""

    threads: int
    """Of one operation (intra-op)."""
    inter_op_threads: int = 1
    is_onednn: bool = True
    micro_batch_size: int = 0
    """A larger batch is computed in pieces of this size; 0: in one piece."""

    @property
    def name(self) -> str:
        """For people: "2 threads, no oneDNN"."""
        parts = [f"{self.threads} thread" + ("" if self.threads == 1 else "s")]
        if self.inter_op_threads != 1:
            parts.append(f"{self.inter_op_threads} inter-op")
        if not self.is_onednn:
            parts.append("no oneDNN")
        if self.micro_batch_size:
            parts.append(f"pieces of {self.micro_batch_size}")
        return ", ".join(parts)


@dataclass(frozen=True)
class ProbeMeasurement:
    """One batch size, measured on one machine."""

    settings: RuntimeSettings
    batch_size: int
    measured_at: float
    """Unix time."""
    step_time_s: float | None
    """Mean of forward, backward and apply; None: it did not fit in memory."""
    num_steps: int = 0
    peak_memory_bytes: int | None = None
    """The most that the process had held by then; 0: a larger size had held more; None: not known."""

    @property
    def fits(self) -> bool:
        """Whether the machine had memory enough."""
        return self.step_time_s is not None

    @property
    def is_in_step(self) -> bool:
        """Whether it is of a trial of all ranks: no process of its own was measured, so it has no peak."""
        return self.fits and self.batch_size > 0 and self.peak_memory_bytes is None

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second; None when it did not fit."""
        return None if self.step_time_s is None else self.batch_size / self.step_time_s


@dataclass(frozen=True)
class CollectiveMeasurement:
    """One sum over the ranks of a fleet, measured."""

    name: str
    """How it is done: 'star', 'ring', …"""
    num_ranks: int
    num_bytes: int
    """Of one rank's vector."""
    seconds: float
    measured_at: float
    """Unix time."""


@dataclass(frozen=True)
class TrialRank:
    """One rank of a plan that was tried."""

    machine_class: str
    """Its key."""
    batch_size: int
    settings: RuntimeSettings


@dataclass(frozen=True)
class TrialMeasurement:
    """A whole plan, tried on the fleet for a few steps."""

    ranks: tuple[TrialRank, ...]
    """The host first."""
    step_s: float
    samples_per_s: float
    measured_at: float
    """Unix time."""
    predicted_samples_per_s: float | None = None
    """What the model had said before; None: nothing."""


def describe_model(info: ModelInfo, architecture_hash: str) -> ModelFeatures:
    """The features of what `build` found; the hash is that of its architecture.json."""
    shapes = list(info.inputs.values()) or [info.input_shape]
    return ModelFeatures(
        hash=architecture_hash,
        name=info.name,
        num_parameters=info.num_parameters,
        num_trainable=info.num_trainable,
        num_operations=info.num_operations,
        input_elements=sum(math.prod(shape) for shape in shapes if shape),
    )
