"""Speed of reading a shard against training on it, and memory of the rank as the shard grows.

    make bench ARGS="-k reading"

MobileNetV2, 64×64×3, one thread.
"""

from pathlib import Path

import numpy as np

from benchmarks.running import run_program

NUM_ROWS = 20_000
PROGRAM = """
import hashlib, json, re, sys, time
from pathlib import Path
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.recipe import compile_model
from tests.unit.worker.compute.built_models import Step
from csdctl.worker.data.prepared import EpochReader
from csdctl.worker.data.schedule import OwnSamples, begin_epoch
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec, RunSpec, Runtime
directory, num_rows = Path(sys.argv[1]), int(sys.argv[2])
paths = [directory / name for name in ("images.npy", "labels.npy")]
hashes = [hashlib.file_digest(path.open("rb"), "sha256").hexdigest() for path in paths]
part = DatasetSlice(*map(str, paths), 0, num_rows, 7, *hashes)
rank = RankSpec(0, "host", 32, Runtime(1), None, part, 0, num_rows)
spec = RunSpec("bench", "", "", Recipe(learning_rate=0.01), (rank,), part, None, "")
reader = EpochReader(spec, 0)
reader.set_epoch(1)
segment = begin_epoch([OwnSamples(0, num_rows)], {0: 32})
tf, keras = load_backend()
model = keras.applications.MobileNetV2(input_shape=(64, 64, 3), classes=200, weights=None)
step = Step(model, compile_model(model, spec.recipe), reader.first(0))
for number in range(3):
    step.alone(*reader.read(segment.shares[0].batch(number)))
started = time.perf_counter()
for number in range(3, 23):
    step.alone(*reader.read(segment.shares[0].batch(number)))
training = 20 * 32 / (time.perf_counter() - started)
started = time.perf_counter()
for number in range(segment.stop_step - 1):
    reader.read(segment.shares[0].batch(number))
reading = (segment.stop_step - 1) * 32 / (time.perf_counter() - started)
# Pages of the mapped file belong to the page cache: the kernel reclaims them when memory is short.
own = int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(json.dumps({"training": training, "reading": reading, "own_mib": own}))
"""


def test_reading_against_training(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = np.lib.format.open_memmap(
        tmp_path / "images.npy", mode="w+", dtype=np.uint8, shape=(NUM_ROWS, 64, 64, 3)
    )
    for start in range(0, NUM_ROWS, 1000):
        images[start : start + 1000] = generator.integers(0, 256, (1000, 64, 64, 3), np.uint8)
    images.flush()
    np.save(tmp_path / "labels.npy", generator.integers(0, 200, NUM_ROWS).astype(np.int32))
    small, large = (run_program(PROGRAM, tmp_path, count) for count in (NUM_ROWS // 10, NUM_ROWS))
    print(
        f"\ntraining {large['training']:.0f} samples/s, reading {large['reading']:,.0f}: "
        f"{large['reading'] / large['training']:.0f} ×\n"
        f"memory of the rank: {small['own_mib']:.0f} MiB with {NUM_ROWS // 10:,} samples, "
        f"{large['own_mib']:.0f} MiB with {NUM_ROWS:,}: {large['own_mib'] / small['own_mib']:.3f} ×"
    )
