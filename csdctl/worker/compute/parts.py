"""Times the parts that a model can be divided into, to choose between strategies it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.features import feature_pass
from csdctl.worker.compute.first_look import find_smallest_embedding
from csdctl.worker.compute.model import load
from csdctl.worker.compute.split_step import SplitStep
from csdctl.worker.compute.step import Step
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.element_spec import random_batch
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.probe import CutTimes, PartsSpec, PartTimes

Batch = tuple[Array, Array]


def time_parts(spec: PartsSpec, tf: Any, keras: Any) -> PartTimes:
    """Return the seconds of a batch of the whole model and of its parts; raises WorkerError."""
    model = load(Path(spec.architecture), Path(spec.weights), keras, spec.code)
    generator, num_indices = np.random.default_rng(0), find_smallest_embedding(model)
    batch = random_batch(generator, spec.data, spec.batch_size, num_indices)
    example = (batch[0][:1], batch[1][:1])
    step = Step(model, spec.recipe, example, tf, keras)
    step.set_step(0, 0.0)
    features = feature_pass(spec.prefix, lambda: (tf, keras), 1, is_keras=True) if spec.prefix else None
    duration_s = spec.min_duration_s
    cuts, why_not = [], ""
    for layer in spec.cuts:
        try:
            cuts.append(_time_cut(step, layer, spec, batch, tf, keras))
        except WorkerError as error:  # an optimizer or a loss that needs the whole model in one place
            why_not = error.message
    return PartTimes(
        step_s=_time(lambda: step.apply(step.local(*batch)), duration_s),
        evaluation_s=_time(lambda: step.evaluate(*batch), duration_s),
        features_s=_time(lambda: features.run(batch[0]), duration_s) if features else 0.0,
        cuts=tuple(cuts),
        why_not=why_not,
    )


def _time_cut(step: Step, layer: str, spec: PartsSpec, batch: Batch, tf: Any, keras: Any) -> CutTimes:
    split = SplitStep(step, layer, spec.recipe, (batch[0][:1], batch[1][:1]), tf, keras)
    split.set_step(0, 0.0)
    split.begin()
    out = np.zeros(split.layout.step_size, np.float32)
    outputs = split.forward(batch[0])
    split.forget()

    def forward() -> None:
        split.forward(batch[0])
        split.forget()

    def both() -> None:
        split.forward(batch[0])
        split.backward(np.zeros_like(outputs), 1.0, out)

    forward_s, both_s = _time(forward, spec.min_duration_s), _time(both, spec.min_duration_s)
    head_s = _time(lambda: split.head(outputs, batch[1], 1.0), spec.min_duration_s)
    return CutTimes(layer, forward_s, max(0.0, both_s - forward_s), head_s)


def _time(compute: Callable[[], object], min_duration_s: float) -> float:
    """Return the mean seconds of `compute` over at least `min_duration_s`, after it has run once."""
    compute()
    started, count, elapsed_s = time.perf_counter(), 0, 0.0
    while count < 2 or elapsed_s < min_duration_s:
        compute()
        count += 1
        elapsed_s = time.perf_counter() - started
    return elapsed_s / count
