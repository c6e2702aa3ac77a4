"""`csdctl scale` on a fleet of one node: the host alone, the node, and what is there already."""

import json

import pytest

from tests.emulated.running import document, emulated, succeed
from tests.emulated.small_jobs import dense_model, save_arrays

pytestmark = pytest.mark.thorough

JOB = """\
model: net.py:build
data: {public: {path: train, on: host}}
recipe: {epochs: 1, optimizer: sgd, learning_rate: 0.05, loss: sparse_categorical_crossentropy, seed: 7}
"""
MODEL = dense_model(8, 8, 1, outputs=10)
SCALE = ("scale", "--batch-size", "16", "--max-steps", "4", "--skip-doctor")


def test_series_trains_what_is_missing_and_nothing_twice(tmp_path):
    save_arrays(tmp_path / "train", 256, 8, 8, 1, num_classes=10)
    with emulated(tmp_path, 1, {"net.py": MODEL, "job.yaml": JOB}):
        planned = document(tmp_path, *SCALE, "--dry-run")
        assert [point["batch_sizes"] for point in planned["points"]] == [[16], [16, 16], [32], [16, 16]]
        first = succeed(tmp_path, *SCALE, "--json")
        weak, strong = (json.loads(line) for line in first.stdout.splitlines()[-2:])
        assert [point["num_nodes"] for point in weak["points"]] == [0, 1]
        assert strong["points"][1]["run_id"] == weak["points"][1]["run_id"]
        assert weak["points"][0]["speedup"] == 1.0
        assert weak["points"][0]["efficiency"] is None, "nothing was tuned"
        again = succeed(tmp_path, *SCALE, "--json").stdout.splitlines()
        assert [json.loads(line)["points"] for line in again] == [weak["points"], strong["points"]]
