"""A probe session: measures the step at one batch size after another, as requested on standard input.

One process serves many sizes, because TensorFlow takes seconds to start, and takes part in trials as a
rank. Each line of input is a request; the answer to a ProbeRequest is a ProbeResult, and READY after a
trial. Samples are random: the time of a step does not depend on them.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np

from csdctl.worker.compute.user_code import load_augmentation
from csdctl.worker.data.arrays import Array, random_batch
from csdctl.worker.engine.load import load_engine
from csdctl.worker.engine.step import StepEngine
from csdctl.worker.process.machine import measure_time, peak_memory_bytes
from csdctl.worker.process.output import exit_with_failure
from csdctl.worker.protocol.events import UNKNOWN_NODE
from csdctl.worker.protocol.json_codec import RESULT, from_json, to_frame
from csdctl.worker.protocol.probe import READY, AttachRequest, ProbeResult, ProbeSpec, request_from_line
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.sandbox.program import check_sandbox
from csdctl.worker.tasks.session import RankSession


def serve_probes(spec: ProbeSpec) -> None:
    """Answer requests until standard input ends."""
    check_sandbox()  # while this process is small: it may become a rank
    generator = np.random.default_rng(0)
    empty = random_batch(generator, spec.data, 0)
    me = RankSpec(0, "", 0, spec.runtime, None, None, 0, 0)
    if spec.compiled:
        augmentation = load_augmentation(spec.recipe.augment, spec.recipe.seed, spec.code)
        step = load_engine(spec.compiled, me, spec.recipe, spec.noise, augmentation)
    else:
        from csdctl.worker.compute.backend import load_backend
        from csdctl.worker.compute.compile import build_engine

        load_backend(spec.runtime)
        own, code, noise = (spec.architecture, spec.weights, spec.recipe), spec.code, spec.noise
        run = RunSpec("", *own, (me,), None, None, "", code=code, noise=noise)
        step = build_engine(run, me, spec.recipe, empty)
    num_indices = step.info.num_indices
    example = random_batch(generator, spec.data, 1, num_indices)
    step.set_step(0, 0.0)
    # The first step traces the graphs, which is part of starting and not of a measurement.
    step.alone(*example, private_copies=_copies(step, spec, 1))
    print(f"\n{READY}", flush=True)  # other output may lack a line end
    for line in sys.stdin:
        request = request_from_line(line)
        if isinstance(request, AttachRequest):
            _take_part(request, step)
            print(f"\n{READY}", flush=True)
            continue
        step.micro_batch_size = None
        batch = random_batch(generator, spec.data, request.batch_size, num_indices)
        copies = _copies(step, spec, request.batch_size)
        step_s, num_steps = measure_time(
            partial(step.alone, *batch, private_copies=copies),
            request.min_duration_s,
            num_warm_ups=request.warm_up_steps,
            min_count=request.min_steps,
        )
        result = ProbeResult(request.batch_size, step_s, num_steps, peak_memory_bytes())
        print(f"\n{to_frame(RESULT, result)}", flush=True)


def _copies(step: StepEngine, spec: ProbeSpec, batch_size: int) -> Array | None:
    return np.ones(batch_size, np.int64) if step.has_noise and spec.is_private else None


def _take_part(request: AttachRequest, step: StepEngine) -> None:
    """Be a rank, with the graphs that are already traced."""
    node = UNKNOWN_NODE
    try:
        spec = from_json(RunSpec, Path(request.spec).read_text())
        node = spec.ranks[request.rank].node
        session = RankSession(spec, request.rank, step)
        session.run()
        session.await_release()
    except BaseException as error:
        exit_with_failure(request.rank, node, error)
