"""Evaluation of the model on the validation data, by rank 0, a batch at a time."""

import time
from typing import Any

from csdctl.worker.compute.step import Step, Sums, add_sums
from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.process.output import emit
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
            num_done = min(len(results) * EVALUATION_BATCH, len(validation))
            emit(Evaluating(me.rank, me.node, num_done, len(validation)))
    total = add_sums(results)
    metrics = step.metrics(total)
    return {
        "validation_loss": total.mean_loss,
        "validation_accuracy": metrics.get("accuracy"),
        "validation_metrics": metrics,
    }
