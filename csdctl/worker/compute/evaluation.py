"""Evaluation of the model on the validation data, by rank 0, a batch at a time."""

import time
from typing import Any

from csdctl.worker.compute.step import Step, Sums, mean_of
from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.process.events import emit
from csdctl.worker.protocol.events import Evaluating
from csdctl.worker.protocol.run_spec import RankSpec

EVALUATION_BATCH = 256


def evaluate(
    step: Step, validation: PreparedSamples, me: RankSpec, progress_interval_s: float
) -> dict[str, Any]:
    """Return mean loss and metrics over `validation` as fields of an EpochEnd; emit progress meanwhile."""
    results: list[Sums] = []
    reported = time.monotonic()
    for batch in validation.batches(EVALUATION_BATCH):
        results.append(step.evaluate(*batch))
        if time.monotonic() - reported >= progress_interval_s:
            reported = time.monotonic()
            num_done = sum(int(result.samples) for result in results)
            emit(Evaluating(me.rank, me.node, num_done, len(validation)))
    mean = mean_of(results)
    metrics = dict(zip(step.evaluated_names, mean.metrics, strict=True))
    return {
        "validation_loss": mean.loss,
        "validation_accuracy": metrics.get("accuracy"),
        "validation_metrics": metrics,
    }
