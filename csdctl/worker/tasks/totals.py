"""What a rank did in some span of a run, as the fields of its events."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from csdctl.worker.compute.step import Sums


@dataclass
class StepTotals:
    """What this rank did since the tally was made; times in seconds."""

    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    sums: Sums = field(default_factory=lambda: Sums(0.0, (), 0.0))
    """Of all ranks."""
    global_samples: int = 0
    """Of all ranks, whatever their weights."""

    def add(self, samples: int, global_samples: int, compute_s: float, wait_s: float, sums: Sums) -> None:
        """Count one step."""
        self.steps += 1
        self.samples += samples
        self.global_samples += global_samples
        self.compute_s += compute_s
        self.wait_s += wait_s
        self.sums = add_sums(self.sums, sums)

    def local(self) -> dict[str, Any]:
        """The fields that every rank's events have."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "compute_s": round(self.compute_s, 6),
            "wait_s": round(self.wait_s, 6),
            "wall_s": round(time.monotonic() - self.started, 6),
        }


def add_sums(one: Sums, other: Sums) -> Sums:
    """Both together; a sum of nothing has no metrics yet."""
    metrics = one.metrics or (0.0,) * len(other.metrics)
    return Sums(
        one.loss + other.loss,
        tuple(a + b for a, b in zip(metrics, other.metrics, strict=True)),
        one.samples + other.samples,
    )


def overall(sums: Sums, global_samples: int, metric_names: Sequence[str]) -> dict[str, Any]:
    """The fields that rank 0 adds: samples, mean loss and metrics of all ranks."""
    count = sums.samples or math.nan
    metrics = {name: value / count for name, value in zip(metric_names, sums.metrics, strict=False)}
    return {
        "global_samples": global_samples,
        "loss": sums.loss / count,
        "accuracy": metrics.get("accuracy"),
        "metrics": metrics,
    }
