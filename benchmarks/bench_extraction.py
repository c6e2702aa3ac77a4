"""Speed of computing features against the forward pass alone, time until the first, and memory.

    make bench ARGS="-k bench_extraction"

EfficientNet-Lite0 up to its last layer, pictures of random numbers at 96×96, one thread; each
round in a process of its own. CPU time is compared: other programs on the machine do not count. Downloads
17 MB.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.running import run_program
from examples.transfer_learning import efficientnet_lite0

NUM_SAMPLES = 1600
ROUNDS = 3
NODE_CPU = 0.22

BUILD = """\
import keras, pathlib
import efficientnet_lite0
from csdctl.worker.compute.model import save_weights
whole = efficientnet_lite0.build()
prefix = keras.Model(whole.input, whole.get_layer("avg_pool").output)
pathlib.Path("prefix.json").write_text(prefix.to_json())
save_weights(pathlib.Path("prefix.npz"), prefix.get_weights())
"""
MEASURE = """\
import json, pathlib, sys, time

def peak_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

from csdctl.worker.ingest.extract import load_computation, extract
from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.protocol.features import ExtractSpec
from csdctl.worker.protocol.json_codec import from_json
import numpy as np

spec = from_json(ExtractSpec, sys.argv[1])
found = {}
def note(progress):
    if progress.num_done and "first_cpu_s" not in found:
        found.update(first_cpu_s=time.process_time(), first_peak_bytes=peak_bytes())
    if progress.num_done == 32:
        found["steady_from_s"] = time.process_time()
extract(spec, on_progress=note)
found["extract_s"] = time.process_time() - found["steady_from_s"]
found["peak_bytes"] = peak_bytes()
samples = PreparedSamples(spec.source)
compute = load_computation(spec)
batches = [samples.read(np.arange(start, start + 32)) for start in range(32, len(samples), 32)]
compute(*batches[0])
began = time.process_time()
for batch in batches:
    compute(*batch)
found["forward_s"] = time.process_time() - began
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("extraction")
    efficientnet_lite0.fetch_weights(directory)
    shutil.copy(efficientnet_lite0.__file__, directory)
    subprocess.run([sys.executable, "-c", BUILD], cwd=directory, check=True, capture_output=True)
    generator = np.random.default_rng(0)
    np.save(directory / "images.npy", generator.integers(0, 256, (NUM_SAMPLES, 96, 96, 3)).astype(np.uint8))
    np.save(directory / "labels.npy", np.zeros(NUM_SAMPLES, np.int32))
    return directory


def stored(path: Path) -> str:
    """Return a link to a file that is named by its content, as in the store."""
    target = path.with_name(hashlib.sha256(path.read_bytes()).hexdigest() + path.suffix)
    if not target.exists():
        target.hardlink_to(path)
    return str(target)


def test_extraction(source: Path, tmp_path: Path) -> None:
    arrays = {name: str(source / f"{name}.npy") for name in ("images", "labels")}
    hashes = {
        f"{name}_sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in arrays.items()
    }
    prefix = {
        "architecture": stored(source / "prefix.json"),
        "weights": stored(source / "prefix.npz"),
        "input_range": None,
    }
    shares = []
    for number in range(ROUNDS):
        spec = {"source": arrays | hashes, "store": str(tmp_path / str(number)), "prefix": prefix}
        found = run_program(MEASURE, json.dumps(spec | {"runtime": {"threads": 1}}))
        shares.append(found["forward_s"] / found["extract_s"])
        print(
            f"\nfirst batch stored after {found['first_cpu_s']:.2f} s of CPU time "
            f"({found['first_cpu_s'] / NODE_CPU:.1f} s at {NODE_CPU:.0%}), "
            f"{found['first_peak_bytes'] / 1e6:.0f} MB; at the end {found['peak_bytes'] / 1e6:.0f} MB; "
            f"{1e3 * found['forward_s'] / (NUM_SAMPLES - 32):.2f} ms a sample forward, "
            f"{1e3 * found['extract_s'] / (NUM_SAMPLES - 32):.2f} ms as features: {shares[-1]:.3f}"
        )
    print(f"forward against features, median {np.median(shares):.3f}")
