"""What a rank of a tuning run measures alone. Trials run in emulated/test_tune.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.worker.data.prepared import SyntheticReader
from csdctl.worker.engine.tensorflow_c import OUT_OF_MEMORY, TensorFlowError
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.orders import ProbeRequest
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import CompiledStep, RankSpec, RunSpec, Runtime
from csdctl.worker.tasks.progress import Reporter, RunProgress
from csdctl.worker.tasks.task import TaskContext
from csdctl.worker.tasks.trial import Trial

INFO = DatasetInfo("data", 100, (4,), "float32", (), 3, "f")
REQUEST = ProbeRequest(8, min_steps=3, min_duration_s=0.0, warm_up_steps=2)


class CountedStep:
    """Notes what it is called with. Raises `error`, if there is one."""

    def __init__(self, *, has_noise: bool = False, error: Exception | None = None) -> None:
        self.has_noise, self.error = has_noise, error
        self.micro_batch_size: int | None = 4
        self.calls: list[tuple[int, Any]] = []

    def set_step(self, number: int, rate: float) -> None:
        assert rate == 0.0, "the weights stay finite"

    def alone(self, samples: Any, labels: Any, *, private_copies: Any) -> None:
        self.calls.append((len(samples), private_copies))
        if self.error:
            raise self.error


def load_trial(step: CountedStep, *, num_private: int = 0) -> Trial:
    me = RankSpec(0, "host", 1, Runtime(), None, None, num_private, 0)
    compiled = CompiledStep("graph", "info", "state")
    spec = RunSpec("tuning", "", "", Recipe(), (me,), None, None, "", compiled=compiled)
    orders: Any = SimpleNamespace()
    trial = Trial(TaskContext(spec, me, RunProgress(spec), Reporter(me), orders))
    trial.reader = SyntheticReader(INFO, 0)
    trial.step = step  # type: ignore[assignment]
    return trial


@pytest.mark.parametrize(("has_noise", "num_private"), [(False, 0), (False, 1), (True, 0), (True, 1)])
def test_steps_of_one_size_are_measured_and_with_noise_those_of_private_samples(
    has_noise: bool, num_private: int
) -> None:
    step = CountedStep(has_noise=has_noise)
    step_time_s, num_steps = load_trial(step, num_private=num_private).measure(REQUEST)
    assert [size for size, _ in step.calls] == [8] * 5
    assert num_steps == 3
    assert step_time_s
    assert step.micro_batch_size is None
    copies = step.calls[-1][1]
    assert (copies is not None) == (has_noise and num_private == 1)
    assert copies is None or np.array_equal(copies, np.ones(8))


@pytest.mark.parametrize("error", [TensorFlowError("OOM when allocating", OUT_OF_MEMORY), MemoryError()])
def test_batch_that_cannot_be_allocated_does_not_fit(error: Exception) -> None:
    assert load_trial(CountedStep(error=error)).measure(REQUEST) == (None, 0)


def test_other_errors_of_tensorflow_are_raised() -> None:
    with pytest.raises(TensorFlowError, match="indices"):
        load_trial(CountedStep(error=TensorFlowError("indices", 3))).measure(REQUEST)
