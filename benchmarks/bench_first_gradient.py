"""A rank from the start of its process to its first gradient: a compiled step, and Python's TensorFlow.

    make bench ARGS="-k first_gradient"

Seconds of CPU and of wall time with CPU of a core (a cgroup's quota, root only), the peak of the memory, and
what of it is private. Batches of 16 samples, one thread. Compiling is not part of it, and is printed apart.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csdctl.emulation.limits import open_cgroup

CPU = 0.22
NETWORKS = ("cnn", "MobileNetV2", "NASNetMobile", "lstm", "transformer")
BUILD = """
import json, os, sys, time
import numpy as np
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.protocol.run_spec import CompiledStep, Runtime
from csdctl.worker.protocol.recipe import Recipe
directory, network = sys.argv[1:3]
recipe = Recipe(learning_rate=0.01)
shape = {"cnn": (28, 28, 1), "lstm": (20,), "transformer": (20,)}.get(network, (64, 64, 3))
rng = np.random.default_rng(0)
samples = rng.integers(0, 1000, (16, *shape)) if len(shape) == 1 else rng.random((16, *shape), np.float32)
labels = np.arange(16, dtype=np.int32) % 10

def build():
    keras = load_backend()[1]
    layers = keras.layers
    if network == "cnn":
        inner = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPool2D(), layers.Conv2D(64, 3)]
        last = [layers.MaxPool2D(), layers.Flatten(), layers.Dropout(0.5), layers.Dense(10)]
        model = keras.Sequential([keras.Input(shape), *inner, *last])
    elif network == "lstm":
        inner = [layers.Embedding(1000, 32, mask_zero=True), layers.Bidirectional(layers.LSTM(32))]
        model = keras.Sequential([keras.Input(shape), *inner, layers.Dense(200)])
    elif network == "transformer":
        inputs = keras.Input(shape)
        x = layers.Embedding(1000, 64)(inputs)
        for _ in range(4):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x))
            inner = layers.Dense(64)(layers.Dense(128, activation="gelu")(x))
            x = layers.LayerNormalization()(x + layers.Dropout(0.1)(inner))
        model = keras.Model(inputs, layers.Dense(200)(layers.GlobalAveragePooling1D()(x)))
    else:
        model = getattr(keras.applications, network)(input_shape=shape, classes=200, weights=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=len(shape) == 1 or network == "cnn")
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
    return model

def report(began, loss):
    rollup = open("/proc/self/smaps_rollup").read().split()
    status = open("/proc/self/status").read().split()
    private = sum(int(rollup[rollup.index(name) + 1]) for name in ("Private_Clean:", "Private_Dirty:"))
    dirty = int(rollup[rollup.index("Private_Dirty:") + 1])
    print(json.dumps({
        "cpu_s": time.process_time(), "wall_s": time.time() - began,
        "peak_mib": int(status[status.index("VmHWM:") + 1]) >> 10,
        "private_mib": private >> 10, "written_mib": dirty >> 10, "loss": float(loss)}))
"""
COMPILE = """
from pathlib import Path
from csdctl.worker.compute.compile import make_compiler, trace, write_graph
output = Path(directory)
compiler = make_compiler(build(), recipe, (samples[:0], labels[:0]))
info, builder = trace(compiler)
write_graph(builder, info, compiler.values, output)
np.savez(output / "batch.npz", samples=samples, labels=labels)
print(json.dumps({"cpu_s": time.process_time()}))
"""
COMPILED = """
import json, os, sys, time
began = time.time()
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as of a worker
import numpy as np
from csdctl.worker.engine.step import StepEngine, StepInfo, load_compiled
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import CompiledStep, Runtime
directory = sys.argv[1]
files = CompiledStep(*(f"{directory}/{name}" for name in ("graph.pb", "info.json", "state.npz")))
engine = StepEngine(*load_compiled(files, StepInfo, Runtime()), Recipe().seed)
batch = np.load(f"{directory}/batch.npz")
vector = engine.local(batch["samples"], batch["labels"])
"""
PYTHON = """
began = time.time()
tf, _ = load_backend()
model = build()
@tf.function
def step(samples, labels):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=labels, y_pred=model(samples, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)
report(began, step(samples, labels)[0] * 16)
"""
REPORT = BUILD[BUILD.index("def report") :] + "report(began, vector[engine.layout.sums][0])\n"


def run(program: str, *arguments: str, cpu: float = 0.0) -> dict[str, Any]:
    command = [sys.executable, "-c", program, *arguments]
    limit = open_cgroup(f"csd-first-{os.getpid()}", cpu) if cpu else None
    try:
        done = subprocess.run(
            limit.build_command(command) if limit else command, capture_output=True, text=True, check=True
        )
    finally:
        if limit:
            limit.close()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_first_gradient(tmp_path: Path, network: str) -> None:
    compiled = run(BUILD + COMPILE, str(tmp_path), network)
    print(f"\n{network}: compiled in {compiled['cpu_s']:.1f} s of CPU")
    found = {}
    for name, program in {"Python": BUILD + PYTHON, "compiled": COMPILED + REPORT}.items():
        run(program, str(tmp_path), network)  # the files are in memory
        free, slow = (run(program, str(tmp_path), network, cpu=cpu) for cpu in (0.0, CPU))
        found[name] = slow["wall_s"]
        print(
            f"{network}, {name}: {free['cpu_s']:.2f} s of CPU; with {CPU} of a core {slow['wall_s']:.1f} s; "
            f"peak {free['peak_mib']} MiB, private {free['private_mib']}, written {free['written_mib']}; "
            f"loss {free['loss'] / 16:.6f}",
            flush=True,
        )
    print(f"{network}: {found['Python'] / found['compiled']:.1f} times as fast")
