"""Probe sessions: what is measured, and the result."""

from dataclasses import dataclass

from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import SCHEMA, from_json
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import Runtime


@dataclass(frozen=True)
class ProbeSpec:
    """What a probe session measures with: the model and how it is trained."""

    architecture: str
    weights: str
    recipe: Recipe
    runtime: Runtime
    data: DatasetInfo
    """The public data: probes take samples of its shape and type, not its samples."""
    noise: Noise | None = None
    """Of the job's private samples."""
    is_private: bool = False
    """With noise, measure samples as private ones are trained on."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class ProbeRequest:
    """Measure one batch size: at least `min_steps` steps and `min_duration_s` seconds of them."""

    batch_size: int
    min_steps: int = 3
    min_duration_s: float = 1.0
    warm_up_steps: int = 2
    """Taken before the clock runs: the first step of a size finds memory and kernels."""
    micro_batch_size: int | None = None
    """A larger batch is computed in pieces of this size."""


@dataclass(frozen=True)
class AttachRequest:
    """Take part in a trial as rank `rank` of the run in file `spec`; then come back to probes.

    The process speaks in events and hears orders, as a rank does, until it has finished and hears `Release`.
    """

    spec: str
    rank: int


@dataclass(frozen=True)
class ProbeResult:
    """The measured step: mean seconds for forward, backward and apply of one batch."""

    batch_size: int
    step_time_s: float
    num_steps: int
    peak_memory_bytes: int

    @property
    def samples_per_s(self) -> float:
        """Samples a second at this batch size."""
        return self.batch_size / self.step_time_s


READY = "ready"
"""The line of a probe session that waits for requests."""


def request_from_json(text: str) -> ProbeRequest | AttachRequest:
    """What a probe session is asked for; raises ProtocolError."""
    if '"spec":' in text:
        return from_json(AttachRequest, text)
    return from_json(ProbeRequest, text)
