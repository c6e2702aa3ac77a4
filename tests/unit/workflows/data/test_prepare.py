"""`prepare` on machines that are directories here, its record, and what a node says of its data."""

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.errors import RemoteCommandError
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.job.model import Job, load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger
from csdctl.transport.local import LocalSession
from csdctl.transport.program import AnswerLimits, Program
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import RESULT, to_frame
from csdctl.workflows.data import prepare as preparing
from csdctl.workflows.data.prepare import Prepared, find_changed, load_prepared, save_prepared
from csdctl.workflows.workspace.workspace import Workspace
from tests.fake_session import FakeSession

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
    rows = np.tril(np.tile(np.arange(1, 8), (longest, 1)))
    return tf.data.Dataset.from_tensor_slices((rows, np.arange(longest) % 2, *more))


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
    project = ProjectDirectory(directory)
    with (
        closing(LocalSession(HOST_NAME, directory)) as host,
        closing(LocalSession("csd0", directory / "csd0", {"HOME": str(directory / "csd0")})) as csd0,
    ):
        sessions = {HOST_NAME: host, "csd0": csd0}
        space = Workspace(project, fleet, {}, {**sessions}, Ledger(project.ledger, "prepare"))
        return preparing.prepare_job(load_job(directory / "job.yaml"), space, lambda line: None)


def test_all_data_follows_the_public_data(directory: Path, first: Prepared) -> None:
    assert first.validation
    infos = [first.public, first.validation, first.private["csd0"]]
    assert {info.sample_shape for info in infos} == {(7,)}
    assert {info.label_dtype for info in infos} == {first.public.label_dtype}
    labels = np.load(directory / first.validation.path / "labels.npy")
    assert labels["sample_weight"].tolist() == [1] * 5
    assert np.load(directory / first.validation.path / "images.npy")[1].tolist() == [1, 2, 0, 0, 0, 0, 0]


@pytest.mark.thorough
def test_changed_code_prepares_the_data_again(directory: Path, first: Prepared) -> None:
    (directory / "words.py").write_text(WORDS.replace("5", "4"))
    second = prepare(directory)
    assert second.validation
    assert second.validation.num_samples == 4
    assert second.public.fingerprint != first.public.fingerprint


PUBLIC = DatasetInfo("p", 60_000, (28, 28, 1), "uint8", (), 9, "f", {"undecodable": 2}, {"cat": 5})
PRIVATE = {"csd0": DatasetInfo("q", 500, (28, 28, 1), "uint8", (), 9, "e")}
RECORDED_JOB = """\
model: keras.applications:MobileNetV2
data: {public: {path: data}, private: {path: /data/private, function: read.py:read}}
recipe: {epochs: 3, learning_rate: 0.1}
"""
DESCRIBED = {"images_sha256": "0" * 64, "num_samples": 501, "path": "/etc", "max_label": 8}


def written(directory: Path, text: str = RECORDED_JOB) -> Job:
    (directory / "job.yaml").write_text(text)
    return load_job(directory / "job.yaml")


@pytest.fixture
def project(tmp_path: Path) -> ProjectDirectory:
    (tmp_path / "read.py").write_text("def read(path): ...\n")
    project = ProjectDirectory(tmp_path)
    save_prepared(project, written(tmp_path), {"public": PUBLIC}, PRIVATE)
    return project


def test_record_has_shapes_and_counts_but_no_names(project: ProjectDirectory) -> None:
    data = load_prepared(project, written(project.root))
    assert data
    assert (data.num_samples, data.num_private) == (60_500, {"csd0": 500})
    assert (data.public.sample_shape, data.public.class_counts) == ((28, 28, 1), {})
    assert '"q"' not in project.prepared("job").read_text()


@pytest.mark.parametrize(
    ("file", "old", "new", "is_valid"),
    [
        ("job.yaml", "epochs: 3", "epochs: 9", True),
        ("job.yaml", "path: data}", "path: other}", False),
        ("job.yaml", "/data/private", "/data/mine", False),
        ("read.py", "...", "return 1", False),  # a function that changed may read other data
        (".csdctl/prepared/job.json", "500", "900", False),  # its checksum is of the number before
    ],
)
def test_other_data_is_new(project: ProjectDirectory, file: str, old: str, new: str, is_valid: bool) -> None:
    path = project.root / file
    path.write_text(path.read_text().replace(old, new))
    assert bool(load_prepared(project, load_job(project.root / "job.yaml"))) is is_valid


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"key": 1, "other": 2}', '{"digests": 5}'])
def test_damaged_record_is_none(project: ProjectDirectory, text: str) -> None:
    project.prepared("job").write_text(text)
    assert load_prepared(project, written(project.root)) is None
    assert find_changed(project, written(project.root), PRIVATE) == []


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        ({}, []),
        ({"fingerprint": "other", "num_samples": 7}, []),  # prepared anew
        *(({name: value}, ["csd0"]) for name, value in DESCRIBED.items()),
    ],
)
def test_changed_description_is_noted(
    project: ProjectDirectory, edit: dict[str, object], found: list[str]
) -> None:
    job = written(project.root)
    save_prepared(project, job, {"public": PUBLIC}, {})  # nodes that do not take part are remembered
    datasets = {"public": PUBLIC, "csd0": replace(PRIVATE["csd0"], **edit), "csd1": PRIVATE["csd0"]}
    assert find_changed(project, job, datasets) == found


FIELDS = json.dumps([["left", "float32", [28, 28]], ["right", "uint8", []]])
INFO = DatasetInfo(
    "data/x",
    10,
    (28, 28, 1),
    "uint8",
    (),
    9,
    "0123456789abcdef",
    {"undecodable": 2},
    {"ant": 10},
    label_dtype="int32",
    max_labels={"": 9},
    max_values={"left": 70_000},
)


def check(info: DatasetInfo) -> None:
    answer = [to_frame(RESULT, info)]
    session = FakeSession("csd0").on("python", replies=lambda request: answer)
    with closing(Program(session, ["python"], "preparing data", AnswerLimits())) as program:
        preparing.check_info(program.call({}, DatasetInfo), "csd0", "preparing data")


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool", ">f4", FIELDS])
def test_descriptions_of_prepared_data_are_accepted(dtype: str) -> None:
    check(replace(INFO, dtype=dtype))
    check(replace(INFO, label_dtype=dtype))


@pytest.mark.attack(13)
@pytest.mark.parametrize(
    "change",
    [
        {"path": ""},
        {"fingerprint": "../../etc"},
        {"num_samples": 0},
        {"sample_shape": (-1,)},
        {"sample_shape": (1,) * 100},
        {"label_shape": (1.5,)},
        {"dtype": "[" * 5000},
        {"dtype": '[["a", "float32", [-1]]]'},
        {"dtype": "O; import os"},
        {"label_dtype": ""},
        {"max_values": {str(n): 1 for n in range(2000)}},
        {"max_label": -2},
    ],
    ids=lambda change: str(change)[:40],
)
def test_other_types_and_ranges_are_an_error_of_the_node(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteCommandError) as raised:
        check(replace(INFO, **change))
    assert raised.value.node == "csd0"
