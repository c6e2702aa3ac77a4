"""Whole commands on a fleet in which one node's Python is the attacker's: the others go on."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.attacks.hostile_python import write_hostile_python
from tests.emulated.running import csdctl

pytestmark = [pytest.mark.first(1), pytest.mark.attack(13), pytest.mark.emulated]

JOB = """\
model: model.py:build
data: {public: {path: public}, private: {path: ~/private}}
recipe: {epochs: 1, learning_rate: 0.05}
"""
MODEL = """\
import keras


def build():
    output = keras.layers.Dense(3, activation="softmax")
    return keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten(), output])
"""
# What csdctl asks for is known from the text of the program that it sends.
PYTHON = """\
program = " ".join(sys.argv)
if "Lock a machine" in program:
    print("@csdctl-mine {}", flush=True)
    sys.stdin.read()
elif "Find processes" in program:
    print("@csdctl-result", CLEANING)
elif "Listen on this machine" in program:
    print("@csdctl-result", LISTENING, flush=True)
    sys.stdin.read()
elif " prepare" in program:
    print(PREPARING, flush=True)
elif "b85decode" in program:
    print(RECEIVING, flush=True)
else:
    import os

    os.execv(PYTHON, [PYTHON, *sys.argv[1:]])
"""
HONEST = {
    "CLEANING": json.dumps(
        {
            "holder": None,
            "processes": [],
            "paths": [],
            "num_bytes": 0,
            "features_bytes": 0,
            "predictions_bytes": 0,
        }
    ),
    "LISTENING": json.dumps({"ports": [1024]}),
    "PREPARING": "",
    "RECEIVING": "@csdctl-result {}",
}
INFO: dict[str, Any] = {
    "path": "data",
    "num_samples": 10,
    "sample_shape": [4, 4, 1],
    "dtype": "uint8",
    "label_shape": [],
    "max_label": 2,
    "label_dtype": "int32",
    "fingerprint": "0123456789abcdef",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("hostile")
    assert csdctl(directory, "emulate", "up", "--nodes", "2", "--cpu", "1").returncode == 0
    content = yaml.safe_load((directory / "fleet.yaml").read_text())
    content["nodes"][1]["python"] = str(directory / "python")
    (directory / "fleet.yaml").write_text(yaml.safe_dump(content))
    (directory / "job.yaml").write_text(JOB)
    (directory / "model.py").write_text(MODEL)
    places = [directory / "public"]
    places += [directory / f".csdctl/emulated/nodes/{node}/home/private" for node in ("csd0", "csd1")]
    for place in places:
        place.mkdir(exist_ok=True)
        np.save(place / "images.npy", np.zeros((9, 4, 4), np.uint8))
        np.save(place / "labels.npy", np.arange(9, dtype=np.int32) % 3)
    yield directory
    csdctl(directory, "emulate", "down")


def behave(directory: Path, **lies: str) -> None:
    """Let csd1 answer as an honest node, but for `lies`."""
    texts = {**HONEST, "PYTHON": sys.executable, **lies}
    body = "".join(f"{name} = {text!r}\n" for name, text in texts.items()) + PYTHON
    write_hostile_python(directory / "python", body)


def assert_only_csd1_failed(done: Any) -> None:
    shown = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 3, shown
    assert "csd1" in shown
    assert "problem: csd0" not in shown
    for defect in ("Traceback", "bug in csdctl", "unexpected"):
        assert defect not in shown


LIES = [
    '@csdctl-error {"message": {"a": 1}}',
    '@csdctl-missing {"ranges": 5, "resume": [], "more": 1}',
    "@csdctl-result " + "[" * 900_000,
    "5",
    "@csdctl-failed []",
]


@pytest.mark.parametrize(
    "lie",
    [*LIES[:3], *(pytest.param(lie, marks=pytest.mark.thorough) for lie in LIES[3:])],
    ids=lambda lie: lie[:20],
)
def test_deploy_reaches_the_other_node(fleet: Path, lie: str) -> None:
    behave(fleet, RECEIVING=lie)
    (fleet / "tree").mkdir(exist_ok=True)
    (fleet / "tree" / "file").write_text(lie[:20])
    assert_only_csd1_failed(csdctl(fleet, "deploy", "--tree", "tree"))
    assert (fleet / ".csdctl/emulated/nodes/csd0/home/tree/file").read_text() == lie[:20]


INFOS = [
    "@csdctl-result " + json.dumps({**INFO, "num_samples": "many"}),
    "@csdctl-result " + json.dumps({**INFO, "sample_shape": [4, 4, "x"]}),
    "@csdctl-result " + json.dumps({**INFO, "dtype": "[[["}),
    "@csdctl-result " + json.dumps({**INFO, "class_counts": {"ant": {}}}),
    "@csdctl-progress " + json.dumps({"num_done": [], "num_total": {}, "num_skipped": None}),
    "@csdctl-result " + "[" * 900_000,
]


@pytest.mark.parametrize(
    "lie",
    [*INFOS[:2], *(pytest.param(lie, marks=pytest.mark.thorough) for lie in INFOS[2:])],
    ids=range(len(INFOS)),
)
def test_data_that_a_node_describes_wrongly_is_that_nodes_failure(fleet: Path, lie: str) -> None:
    behave(fleet, PREPARING=lie)
    assert_only_csd1_failed(csdctl(fleet, "prepare"))


@pytest.mark.parametrize(
    "lie",
    [
        '{"holder": {"pid": []}}',
        "[" * 900_000,
        *(pytest.param(lie, marks=pytest.mark.thorough) for lie in ("{}", "5", '{"holder": 5}')),
    ],
    ids=lambda lie: lie[:20],
)
def test_cleaning_reaches_the_other_node(fleet: Path, lie: str) -> None:
    behave(fleet, CLEANING=lie)
    assert_only_csd1_failed(csdctl(fleet, "clean", "--yes"))
