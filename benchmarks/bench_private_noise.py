"""The cost of clipping and noise: time and memory of a step against a step without them, alternately.

    make bench ARGS="-k private_noise"

All samples of the step are private; one thread.
"""

import pytest

from benchmarks.running import run_program

PROGRAM = """
import json, sys, time
import numpy as np
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.engine.step import secret_normal
from csdctl.worker.compute.recipe import compile_model
from tests.unit.worker.compute.built_models import Step
from csdctl.worker.process.machine import peak_memory_bytes
from csdctl.worker.protocol.recipe import Noise, Recipe
name, count, has_noise = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "noise"
tf, keras = load_backend()
layers = keras.layers
if name == "convolutions":
    size = 32
    inner = [layers.Conv2D(width, 3, strides=2, activation="relu") for width in (32, 64, 128)]
    inner += [layers.GlobalAveragePooling2D()]
else:
    size = 64
    inner = [layers.Conv2D(width, 3, strides=2, activation="relu") for width in (32, 64)]
    inner += [layers.Flatten(), layers.Dense(256, activation="relu")]
model = keras.Sequential([keras.Input((size, size, 3)), *inner, layers.Dense(10, activation="softmax")])
generator = np.random.default_rng(0)
images = generator.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
labels = generator.integers(0, 10, count).astype(np.int32)
recipe = compile_model(model, Recipe(learning_rate=0.01))
noise = Noise(1.0, 8.0, 1e-5) if has_noise else None
step = Step(model, recipe, (images, labels), noise=noise)
out, copies = np.zeros(step.layout.step_size, np.float32), np.ones(count, np.int64)
times = []
for _ in range(8):
    started = time.perf_counter()
    step.local(images, labels, out, private_copies=copies)
    times.append(time.perf_counter() - started)
started = time.perf_counter()
secret_normal(1_000_000)
print(json.dumps({
    "step_s": sorted(times[2:])[3], "peak_mib": peak_memory_bytes() / 2**20,
    "parameters": step.layout.num_gradients, "million_numbers_s": time.perf_counter() - started,
}))
"""


@pytest.mark.parametrize("count", [32, 128])
@pytest.mark.parametrize("name", ["convolutions", "dense layer"])
def test_step_with_noise_against_one_without(name: str, count: int) -> None:
    rounds = [[run_program(PROGRAM, name, count, mode) for mode in ("without", "noise")] for _ in range(3)]
    ratios = sorted(noisy["step_s"] / plain["step_s"] for plain, noisy in rounds)
    plain, noisy = rounds[-1]
    print(
        f"\n{name}, {plain['parameters']:,.0f} parameters, {count} samples: "
        f"{ratios[1]:.1f} × the time of a step ({ratios[0]:.1f} to {ratios[2]:.1f}; "
        f"{plain['step_s'] * 1e3:.0f} and {noisy['step_s'] * 1e3:.0f} ms), "
        f"{noisy['peak_mib']:.0f} against {plain['peak_mib']:.0f} MiB; "
        f"a million numbers of noise in {noisy['million_numbers_s'] * 1e3:.0f} ms"
    )
