"""Times the parts of a model on the host, to choose between strategies."""

from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.compile import make_compiler, make_engine, trace
from csdctl.worker.compute.forward import feature_pass
from csdctl.worker.compute.model import load
from csdctl.worker.compute.split import SplitCompiler
from csdctl.worker.compute.trace import GraphBuilder
from csdctl.worker.data.arrays import Array, random_batch
from csdctl.worker.engine.split import SplitStep
from csdctl.worker.engine.step import StepInfo
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.machine import measure_time
from csdctl.worker.protocol.model_info import CutTimes, PartsSpec, PartTimes


def time_parts(spec: PartsSpec, **_: Any) -> PartTimes:
    """Return the seconds of a batch of the whole model and of its parts. Raises WorkerError."""
    load_backend(spec.runtime)
    model = load(Path(spec.architecture), Path(spec.weights), spec.code)
    empty = random_batch(np.random.default_rng(0), spec.data, 0)
    compiler = make_compiler(model, spec.recipe, empty)
    info, builder = trace(compiler)
    batch = random_batch(np.random.default_rng(0), spec.data, spec.batch_size, info.num_indices)
    engine = make_engine(compiler, info, builder, spec.runtime)
    features = feature_pass(spec.prefix, spec.runtime) if spec.prefix else None
    duration_s = spec.min_duration_s
    cuts, why_not = [], ""
    for layer in spec.cuts:
        try:
            cuts.append(_time_cut(compiler, info, layer, spec, batch))
        except WorkerError as error:  # an optimizer or a loss that needs the whole model in one place
            why_not = error.message
    return PartTimes(
        step_s=measure_time(lambda: engine.apply(engine.local(*batch)), duration_s)[0],
        evaluation_s=measure_time(lambda: engine.evaluate(*batch), duration_s)[0],
        features_s=measure_time(lambda: features.run(batch[0]), duration_s)[0] if features else 0.0,
        cuts=tuple(cuts),
        why_not=why_not,
    )


def _time_cut(
    compiler: Any, info: StepInfo, layer: str, spec: PartsSpec, batch: tuple[Array, Array]
) -> CutTimes:
    builder = GraphBuilder()
    of_parts = SplitCompiler(compiler, layer, batch).add_to(builder, info)
    split = SplitStep(make_engine(compiler, of_parts, builder, spec.runtime))
    out = np.zeros(split.layout.step_size, np.float32)

    def forward() -> Array:
        split.forget()
        return split.forward(batch[0])

    outputs = forward()
    forward_s = measure_time(forward, spec.min_duration_s)[0]
    both_s = measure_time(lambda: split.backward(np.zeros_like(forward()), 1.0, out), spec.min_duration_s)[0]
    head_s = measure_time(lambda: split.head(outputs, batch[1], 1.0, 0, 0), spec.min_duration_s)[0]
    return CutTimes(layer, forward_s, max(0.0, both_s - forward_s), head_s)
