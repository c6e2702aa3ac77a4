"""`csdctl predict` on an emulated host and two nodes, compared with the model of one process."""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.emulated.running import csdctl, document, emulated, home_of
from tests.emulated.small_jobs import ALL_DATA, small_job

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_SAMPLES = 80
NUM_PUBLIC = 200
JOB = small_job("epochs: 1, learning_rate: 0.01", ".npz", data=ALL_DATA)
MODEL = """\
import keras
from keras import layers


def build():
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((12, 12, 3)),
        layers.Conv2D(8, 3, activation="relu", name="pictures"),
        layers.GlobalAveragePooling2D(name="pooled"),
        layers.Dense(4, activation="softmax", kernel_initializer=keras.initializers.RandomNormal(stddev=9.0)),
    ])
"""
SAVE = """\
import keras, model, sys, numpy as np
trained = model.build()
trained.compile("sgd", "sparse_categorical_crossentropy")
trained.save("trained.keras")
pooled = keras.Model(trained.inputs, trained.get_layer("pooled").output)
expected = {}
for name in sys.argv[1:]:
    samples = np.load(name)["x"] / np.float32(255)
    expected[name] = trained.predict(samples, verbose=0)
    expected["pooled " + name] = pooled.predict(samples, verbose=0)
np.savez("expected.npz", **expected)
"""


def write(path: Path, seed: int, count: int = NUM_SAMPLES) -> None:
    generator = np.random.default_rng(seed)
    pictures = generator.integers(0, 256, (count, 12, 12, 3))
    np.savez(path, x=pictures.astype(np.uint8), y=generator.integers(0, 4, count))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("predict"), 2, {"job.yaml": JOB, "model.py": MODEL}) as directory:
        data = [directory / "public.npz", directory / "validation.npz"]
        data += [home_of(directory, node) / "private.npz" for node in ("csd0", "csd1")]
        for number, path in enumerate(data):
            write(path, number, NUM_PUBLIC if path.stem == "public" else NUM_SAMPLES)
        command = [sys.executable, "-c", SAVE, *map(str, data)]
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
        yield directory


def predict(project: Path, *arguments: str) -> dict[str, Any]:
    return document(project, "predict", *arguments)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def expected_of(project: Path, data: str, prefix: str = "") -> Any:
    """Return what one process on the host computes for the samples of a data set."""
    path = home_of(project, data) / "private.npz" if data.startswith("csd") else project / f"{data}.npz"
    with np.load(project / "expected.npz") as arrays:
        return arrays[f"{prefix}{path}"]


def test_classes_of_all_samples_are_those_of_one_process(project: Path) -> None:
    num_rows = NUM_PUBLIC + 3 * NUM_SAMPLES
    first = predict(project, "trained.keras", "--on", "all")
    assert first["num_rows"] == first["num_computed"] == num_rows
    assert first["num_rows_of"] == {
        "host": NUM_PUBLIC + NUM_SAMPLES,
        "csd0": NUM_SAMPLES,
        "csd1": NUM_SAMPLES,
    }
    rows = read_rows(project / "predictions.csv")
    keys = [(row["data"], row["node"], int(row["row"])) for row in rows]
    counts = {"public": NUM_PUBLIC, "validation": NUM_SAMPLES, "private": NUM_SAMPLES}
    sets = [("public", "host"), ("validation", "host"), ("private", "csd0"), ("private", "csd1")]
    assert keys == [(*name, row) for name in sets for row in range(counts[name[0]])]
    scores = np.concatenate([expected_of(project, data) for data in ("public", "validation", "csd0", "csd1")])
    assert [int(row["class"]) for row in rows] == scores.argmax(axis=1).tolist()
    np.testing.assert_allclose([float(row["probability"]) for row in rows], scores.max(axis=1), rtol=1e-5)
    before = (project / "predictions.csv").read_bytes()
    again = predict(project, "trained.keras", "--on", "all", "--force")
    assert (again["num_rows"], again["num_computed"]) == (num_rows, 0)
    assert (project / "predictions.csv").read_bytes() == before


def test_absent_node_lacks_its_private_rows_alone(project: Path) -> None:
    fleet = yaml.safe_load((project / "fleet.yaml").read_text())
    fleet["nodes"][1]["port"] = 1  # where nothing listens
    (project / "away.yaml").write_text(yaml.safe_dump(fleet))
    arguments = ("trained.keras", "--on", "all", "--fleet", "away.yaml")
    predict(project, *arguments[:-2], "--output", "all.csv")
    done = csdctl(project, "predict", *arguments, "--output", "away.csv", "--json")
    assert done.returncode == 3, done.stderr
    assert f"private rows of csd1 ({NUM_SAMPLES}) are missing" in " ".join(done.stderr.split())
    predicted = json.loads(done.stdout)
    assert predicted["num_missing"] == {"csd1": NUM_SAMPLES}
    assert predicted["num_computed"] == 0
    everything = (project / "all.csv").read_text().splitlines()
    present = [line for line in everything if not line.startswith("private,csd1,")]
    assert (project / "away.csv").read_text().splitlines() == present


def test_scores_and_embeddings_of_private_samples(project: Path) -> None:
    for want, prefix in (("scores", ()), ("embeddings", ("--layer", "pooled"))):
        predicted = predict(project, "trained.keras", "--want", want, *prefix, "--output", f"{want}.npz")
        assert predicted["num_rows"] == 2 * NUM_SAMPLES
        with np.load(project / f"{want}.npz") as arrays:
            assert arrays["node"].tolist() == ["csd0"] * NUM_SAMPLES + ["csd1"] * NUM_SAMPLES
            expected = [expected_of(project, node, "pooled " if prefix else "") for node in ("csd0", "csd1")]
            np.testing.assert_allclose(arrays["value"], np.concatenate(expected), rtol=1e-4, atol=1e-6)
    kinds = {json.loads(line)["kind"] for line in (project / ".csdctl/ledger.jsonl").read_text().splitlines()}
    assert {"scores of private samples", "embeddings of private samples"} <= kinds
