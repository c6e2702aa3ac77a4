"""Loss and accuracy of one Keras process and of a host with five nodes: same model, data and global batch,
with gradients as float32 and as bfloat16 on the wire.

    make bench ARGS="-k same_learning"

Fashion-MNIST and the demo's network on an emulated fleet, three seeds. Keras `fit` begins with the same
weights and gets the same samples in the same steps, from the run's spec: only the engine differs. Prints
figures, asserts no limits.
"""

import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.running import EXAMPLES, csdctl, emulated_fleet, place_sample, run_program, write_plan

SEEDS = (1, 2, 3)
EPOCHS, WARMUP_EPOCHS = 8, 1
HOST_BATCH, NODE_BATCH, NUM_NODES = 200, 24, 5
RATE, REFERENCE = 0.01, 128
KERAS = """
import json, sys
import numpy as np
import keras
from csdctl.worker.data.prepared import EpochReader
from csdctl.worker.data.schedule import OwnSamples, Span, begin_epoch
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.run_spec import RunSpec
sys.path.insert(0, ".")
from fashion_cnn import build
spec = from_json(RunSpec, open(sys.argv[1] + "/spec.json").read())
recipe, reader = spec.recipe, EpochReader(spec, 0)
segment = begin_epoch(
    [OwnSamples(rank.num_private, rank.num_public) for rank in spec.ranks],
    {rank.rank: rank.batch_size for rank in spec.ranks},
)
def batches():
    for epoch in range(1, recipe.epochs + 1):
        reader.set_epoch(epoch)
        for step in range(segment.stop_step):
            parts = [share.batch(step) for share in segment.shares]
            spans = [Span(part.rank, part.public_start, part.public_stop) for part in parts]
            images, labels = reader.read_reassigned(spans)
            yield images / np.float32(255), labels
keras.utils.set_random_seed(recipe.seed)
model = build()
warm = segment.stop_step * recipe.warmup_epochs
falling = segment.stop_step * recipe.epochs - warm
target = recipe.learning_rate * segment.global_batch / recipe.reference_batch
rate = keras.optimizers.schedules.CosineDecay(
    recipe.learning_rate, falling, warmup_target=target, warmup_steps=warm
)
sgd = keras.optimizers.SGD(rate, momentum=recipe.optimizer_args["momentum"])
model.compile(sgd, "sparse_categorical_crossentropy", metrics=["accuracy"])
done = model.fit(batches(), steps_per_epoch=segment.stop_step, epochs=recipe.epochs, verbose=0)
images, labels = (np.load(f"data/validation/{name}.npy") for name in ("images", "labels"))
images = images.reshape(len(images), 28, 28, 1) / np.float32(255)
loss, accuracy = model.evaluate(images, labels, batch_size=500, verbose=0)
print(json.dumps({"loss": loss, "accuracy": accuracy, "training_loss": done.history["loss"][-1]}))
"""


@pytest.fixture
def fleet_directory(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(EXAMPLES / "fashion_mnist", tmp_path, dirs_exist_ok=True)
    with emulated_fleet(tmp_path, NUM_NODES, 0.15):
        yield tmp_path


def write_job(directory: Path, seed: int, compression: str) -> None:
    """Write the demo's job without private data, so that one process can read all data, and its plan."""
    job = yaml.load((directory / "job.yaml").read_text(), yaml.BaseLoader)  # `on` is a string here
    job["data"].pop("private", None)
    job["recipe"] |= {"epochs": EPOCHS, "seed": seed, "learning_rate": RATE, "reference_batch": REFERENCE}
    job["recipe"] |= {"warmup_epochs": WARMUP_EPOCHS, "decay": "cosine", "compression": compression}
    (directory / "same.yaml").write_text(yaml.safe_dump(job).replace("'", ""))
    ranks = [{"node": "host", "batch_size": HOST_BATCH, "threads": 2}]
    ranks += [{"node": f"csd{n}", "batch_size": NODE_BATCH, "threads": 1} for n in range(NUM_NODES)]
    write_plan(directory, "same.yaml", ranks)


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_same_learning_as_one_keras_process(fleet_directory: Path, compression: str) -> None:
    of_seeds = []
    place_sample(fleet_directory, "fashion-mnist", "--private", "")
    for seed in SEEDS:
        write_job(fleet_directory, seed, compression)
        csdctl(fleet_directory, "prepare", "same.yaml")
        options = ["--plan", "plan.yaml", "--skip-doctor"]
        report = csdctl(fleet_directory, "train", "same.yaml", *options)[-1]
        peer = run_program(KERAS, report["path"], cwd=fleet_directory)
        pairs = {
            "training loss": (report["loss"], peer["training_loss"]),
            "validation loss": (report["validation_loss"], peer["loss"]),
            "validation accuracy": (report["validation_accuracy"], peer["accuracy"]),
        }
        of_seeds.append(pairs)
        figures = ", ".join(f"{name} {ours:.4f} and {theirs:.4f}" for name, (ours, theirs) in pairs.items())
        print(f"\nseed {seed}, csdctl and one process: {figures}")
    print(
        f"\nmeans of {len(SEEDS)} seeds, global batch {HOST_BATCH + NUM_NODES * NODE_BATCH}, {EPOCHS} epochs:"
    )
    for name in of_seeds[0]:
        ours, theirs = (statistics.mean(pairs[name][side] for pairs in of_seeds) for side in (0, 1))
        by = f"{100 * (ours - theirs):+.2f} points" if "accuracy" in name else f"{ours / theirs - 1:+.2%}"
        print(f"{name:20} {ours:.4f} and {theirs:.4f}: {by}")
