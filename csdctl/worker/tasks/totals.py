"""Sums over several steps, as the fields of a rank's events."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from csdctl.worker.compute.step import Sums, add_sums


@dataclass(frozen=True)
class StepResult:
    """One step of this rank."""

    samples: int
    """Of this rank."""
    global_samples: int
    """Of all ranks."""
    compute_s: float
    wait_s: float
    sums: Sums
    """Of all ranks."""
    input_s: float = 0.0
    """Of compute_s: reading samples."""
    others_s: float | None = 0.0
    """Of wait_s: until the slowest rank had computed; None where that is not known."""
    is_stopping: bool = False
    """Whether a stop was requested."""


@dataclass
class StepTotals:
    """The steps of this rank since this object was created; times in seconds."""

    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    input_s: float = 0.0
    others_s: float | None = 0.0
    cpu_started: float = field(default_factory=time.process_time)
    sums: Sums = field(default_factory=lambda: Sums(0.0, (), 0.0))
    """Of all ranks."""
    global_samples: int = 0
    """Of all ranks, whatever their weights."""

    def add(self, step: StepResult) -> None:
        """Add one step."""
        self.steps += 1
        self.samples += step.samples
        self.global_samples += step.global_samples
        self.compute_s += step.compute_s
        self.wait_s += step.wait_s
        self.input_s += step.input_s
        if self.others_s is not None:
            self.others_s = None if step.others_s is None else self.others_s + step.others_s
        self.sums = add_sums([self.sums, step.sums])

    def local_fields(self) -> dict[str, Any]:
        """Return the fields that the events of every rank have."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "compute_s": round(self.compute_s, 6),
            "wait_s": round(self.wait_s, 6),
            "wall_s": round(time.monotonic() - self.started, 6),
            "input_s": round(self.input_s, 6),
            "others_s": None if self.others_s is None else round(self.others_s, 6),
            "cpu_s": round(time.process_time() - self.cpu_started, 6),
        }


def global_fields(sums: Sums, global_samples: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields that rank 0 adds: samples, mean loss and metrics of all ranks."""
    return {
        "global_samples": global_samples,
        "loss": sums.mean_loss,
        "accuracy": metrics.get("accuracy"),
        "metrics": dict(metrics),
    }
