"""`prepare` with functions of the user's, on a host and a node that are directories of this machine."""

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.job.model import load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger
from csdctl.transport.local import LocalSession
from csdctl.workflows.data.prepare import Prepared, prepare_job
from csdctl.workflows.workspace.workspace import Workspace

JOB = """\
model: model.py:build
code: [words.py]
data:
  public: {path: data, function: data.py:public}
  validation: {path: data, function: data.py:validation}
  private: {path: private, function: data.py:private}
recipe: {epochs: 1, learning_rate: 0.05}
"""
MODEL = """\
import keras


def build():
    model = keras.Sequential([
        keras.Input((None,), dtype="int64"),
        keras.layers.Embedding(20, 4, mask_zero=True),
        keras.layers.LSTM(3),
        keras.layers.Dense(1, activation="sigmoid"),
    ])
    model.compile("adam", loss="binary_crossentropy")
    return model
"""
WORDS = "LENGTHS = {'public': 7, 'validation': 5, 'private': 6}\n"
DATA = """\
import numpy as np
import tensorflow as tf

from words import LENGTHS


def sequences(longest, *more):
    rows = [list(range(1, 1 + length)) for length in range(1, longest + 1)]
    return tf.data.Dataset.from_tensor_slices((tf.ragged.constant(rows), np.arange(longest) % 2, *more))


def public(path):
    return sequences(LENGTHS["public"], np.full(LENGTHS["public"], 0.5)).batch(3)


def validation(path):
    return sequences(LENGTHS["validation"])


def private(path):
    return sequences(LENGTHS["private"]).batch(2)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job directory for the whole module, in which everything can be prepared."""
    directory = tmp_path_factory.mktemp("job")
    write_job(directory, JOB)
    (directory / "data.py").write_text(DATA)
    return directory


@pytest.fixture(scope="module")
def first(directory: Path) -> Prepared:
    return prepare(directory)


def write_job(tmp_path: Path, job: str) -> None:
    for name, text in {"job.yaml": job, "model.py": MODEL, "words.py": WORDS}.items():
        (tmp_path / name).write_text(text)
    for directory in (tmp_path / "data", tmp_path / "csd0" / "private"):
        directory.mkdir(parents=True)
        (directory / "source").write_text("anything")


def prepare(directory: Path) -> Prepared:
    fleet = Fleet((Node("csd0", "127.0.0.1", python=sys.executable),))
    lines: list[str] = []
    project = ProjectDirectory(directory)
    with (
        closing(LocalSession(HOST_NAME, directory)) as host,
        closing(LocalSession("csd0", directory / "csd0")) as csd0,
    ):
        sessions = {HOST_NAME: host, "csd0": csd0}
        space = Workspace(project, fleet, {}, {**sessions}, Ledger(project.ledger, "prepare"))
        prepared = prepare_job(load_job(directory / "job.yaml"), space, lines.append)
    (directory / "said").write_text("\n".join(lines))
    return prepared


def test_all_data_follows_the_public_data(directory: Path, first: Prepared) -> None:
    assert first.validation
    infos = [first.public, first.validation, first.private["csd0"]]
    assert {info.sample_shape for info in infos} == {(7,)}
    assert {info.label_dtype for info in infos} == {first.public.label_dtype}
    labels = np.load(directory / first.validation.path / "labels.npy")
    assert labels["sample_weight"].tolist() == [1] * 5
    assert np.load(directory / first.validation.path / "images.npy")[1].tolist() == [1, 2, 0, 0, 0, 0, 0]
    said = (directory / "said").read_text()
    for name in ("public", "validation", "csd0"):
        assert f"{name}: different lengths were padded with 0: samples to 7" in said


@pytest.mark.thorough
def test_changed_code_prepares_the_data_again(directory: Path, first: Prepared) -> None:
    (directory / "words.py").write_text(WORDS.replace("5", "4"))
    second = prepare(directory)
    assert second.validation
    assert second.validation.num_samples == 4
    assert second.public.fingerprint != first.public.fingerprint
