"""A probe session: measures the step at one batch size after another, as asked on standard input.

One process for many sizes, because TensorFlow takes seconds to start. Each line in is a ProbeRequest,
each line out a ProbeResult. Random pictures serve: the time of a step does not depend on them.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.contract import ProbeRequest, ProbeResult, ProbeSpec, from_json, to_json
from csdctl.worker.data import Array
from csdctl.worker.model import load
from csdctl.worker.step import Step
from csdctl.worker.train_rank import peak_memory_bytes

READY = "ready"
WARM_UP_STEPS = 2


def serve_probes(spec: ProbeSpec, tf: Any, keras: Any) -> None:
    """Answer requests until standard input ends."""
    model = load(Path(spec.architecture), Path(spec.weights), keras)
    shape = tuple(size or 1 for size in model.input_shape[1:])
    generator = np.random.default_rng(0)

    def batch(size: int) -> tuple[Array, Array]:
        images = generator.integers(0, 256, (size, *shape), dtype=np.uint8)
        if spec.max_label >= 0:
            return images, generator.integers(0, spec.max_label + 1, size, dtype=np.int32)
        return images, generator.random((size, *model.output_shape[1:]), dtype=np.float32)

    step = Step(model, spec.recipe, batch(1), tf, keras)
    step.set_learning_rate(0.0)
    print(READY, flush=True)
    for line in sys.stdin:
        request = from_json(ProbeRequest, line)
        print(to_json(measure(step, batch(request.batch_size), request)), flush=True)


def measure(step: Step, batch: tuple[Array, Array], request: ProbeRequest) -> ProbeResult:
    """Median time of forward, backward and apply, without any other rank."""
    for _ in range(WARM_UP_STEPS):
        step.apply(step.local(*batch))
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < request.min_steps or time.perf_counter() - started < request.min_duration_s:
        begun = time.perf_counter()
        step.apply(step.local(*batch))
        times.append(time.perf_counter() - begun)
    return ProbeResult(request.batch_size, statistics.median(times), len(times), peak_memory_bytes())
