"""Images per second that `csdctl prepare` converts to samples.

The images are smooth with some noise, like photographs: a decoder takes several times as long for pure noise.
"""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.running import run_program
from csdctl.worker.ingest.sources.source import num_threads
from csdctl.worker.protocol.datasets import ImageRule, PrepareSpec, RecordSchema
from csdctl.worker.protocol.json_codec import to_json
from tests.unit.worker.ingest.sources.encoded_images import jpeg, png, tensorflow


def photograph(height: int, width: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (8, 8, 3)).astype(np.float32)
    smooth = np.asarray(tensorflow().image.resize(coarse, (height, width), method="bicubic"))
    return np.clip(smooth + random.normal(0, 4, smooth.shape), 0, 255).astype(np.uint8)


PROGRAM = """
import json, sys, time
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.protocol.datasets import PrepareSpec
from csdctl.worker.protocol.json_codec import from_json
started = time.perf_counter()
prepare(from_json(PrepareSpec, sys.argv[1]), threads=int(sys.argv[2]))
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds}))
"""


def measure(name: str, spec: PrepareSpec, num_images: int, threads: int) -> None:
    """Prepare in a process of its own."""
    seconds = run_program(PROGRAM, to_json(spec), threads)["seconds"]
    print(f"{name}, {num_images:,} images, {threads} threads: {num_images / seconds:,.0f} images/s")


@pytest.mark.parametrize(
    ("encoding", "height", "width", "num_images"),
    [("jpeg", 480, 640, 1000), ("png", 480, 640, 400), ("png", 64, 64, 2000)],
)
def test_class_folders(tmp_path: Path, encoding: str, height: int, width: int, num_images: int) -> None:
    encode = {"jpeg": jpeg, "png": png}[encoding]
    encoded = [encode(photograph(height, width, seed)) for seed in range(4)]
    (tmp_path / "data" / "one").mkdir(parents=True)
    for number in range(num_images):
        (tmp_path / "data" / "one" / f"{number}.{encoding}").write_bytes(encoded[number % len(encoded)])
    for threads in sorted({1, num_threads()}):
        store = str(tmp_path / f"store{threads}")
        spec = PrepareSpec(str(tmp_path / "data"), store, ImageRule((64, 64, 3)), names_classes=True)
        measure(f"{encoding} {width}×{height} to 64×64", spec, num_images, threads)


def test_tfrecord_of_raw_images(tmp_path: Path) -> None:
    num_images = 20_000
    train = tensorflow().train
    with tensorflow().io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        image = train.Feature(bytes_list=train.BytesList(value=[photograph(64, 64, 0).tobytes()]))
        label = train.Feature(int64_list=train.Int64List(value=[1]))
        record = train.Example(features=train.Features(feature={"image": image, "label": label}))
        for _ in range(num_images):
            writer.write(record.SerializeToString())
    spec = PrepareSpec(
        str(tmp_path / "a.tfrecord"),
        str(tmp_path / "store"),
        ImageRule((64, 64, 3)),
        records=RecordSchema("image", "label", (64, 64, 3)),
    )
    measure("TFRecord of raw 64×64", spec, num_images, 1)
