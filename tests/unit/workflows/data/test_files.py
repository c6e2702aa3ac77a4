"""Shards and models: what is cut or built, stored with its hashes, and made again when it has changed."""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.errors import InputError, UnreachableError
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.job.model import Data, HostData, Job, load_job
from csdctl.placement.equation1 import place_shards
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.deliver import DEFAULT_IGNORED, DeliveryProgress, FileTree
from csdctl.shipping.store import StoredFile, hash_file
from csdctl.transport.local import LocalSession
from csdctl.worker.data.prepared import rows_of
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import DatasetSlice
from csdctl.workflows.data import deploy
from csdctl.workflows.data import files as model_files
from csdctl.workflows.data.files import SampleShapes, SerializedModel, cut_shards, shapes_of

PLACED = place_shards({"host": 10, "csd0": 5, "csd1": 5}, {}, 40)


def write(root: Path, first: int = 0) -> DatasetInfo:
    """Write 40 samples and labels, counted from `first`."""
    (root / "data").mkdir(exist_ok=True)
    paths = [root / "data" / name for name in ("images.npy", "labels.npy")]
    for path in paths:
        np.save(path, np.arange(first, first + 40, dtype=np.int32))
    hashes = [hash_file(path) for path in paths]
    return DatasetInfo("data", 40, (), "int32", (), 39, "f", images_sha256=hashes[0], labels_sha256=hashes[1])


@pytest.fixture
def public(tmp_path: Path) -> DatasetInfo:
    return write(tmp_path)


def cut(root: Path, public: DatasetInfo, seed: int = 3) -> dict[str, tuple[StoredFile, StoredFile]]:
    job = Job("model.keras", Data(HostData(root)), Recipe(seed=seed))
    return cut_shards(PLACED, public, job, ProjectDirectory(root))


def content(shards: dict[str, tuple[StoredFile, StoredFile]]) -> dict[str, list[list[int]]]:
    return {name: [np.load(file.source).tolist() for file in files] for name, files in shards.items()}


@pytest.mark.parametrize("text", [None, "", "[]", '["a", "b"]', "{}", "[" * 100_000])
def test_shard_that_was_swapped_is_cut_again(tmp_path: Path, public: DatasetInfo, text: str | None) -> None:
    shards = cut(tmp_path, public)
    before = content(shards)
    np.save(shards["csd0"][0].source, np.zeros(10, np.int32))
    shards["csd1"][1].source.unlink()
    for record in ProjectDirectory(tmp_path).shards.glob("*/hashes.json") if text is not None else ():
        record.write_text(text)
    assert cut(tmp_path, public) == shards
    assert content(shards) == before


def test_shards_that_were_exchanged_are_cut_again(tmp_path: Path, public: DatasetInfo) -> None:
    shards = cut(tmp_path, public)
    before = content(shards)
    first, second = (shards[name][0].source.parent for name in ("csd0", "csd1"))
    aside = first.rename(first.with_name("aside"))
    second.rename(first)
    aside.rename(second)
    assert content(shards) != before
    assert content(cut(tmp_path, public)) == before


def test_public_data_that_was_swapped_is_not_cut(tmp_path: Path, public: DatasetInfo) -> None:
    other = write(tmp_path, first=100)
    with pytest.raises(InputError, match="data/images.npy is not what was prepared") as raised:
        cut(tmp_path, public)
    assert public.images_sha256 in raised.value.message
    assert other.images_sha256 in raised.value.message
    assert raised.value.remedy == "run `csdctl prepare`"


def test_other_content_is_cut_anew_and_other_seeds_differ(tmp_path: Path, public: DatasetInfo) -> None:
    """Also where the fingerprint, that of names, sizes and times, is the same; the host leaves these rows."""
    before = content(cut(tmp_path, public))
    shards = content(cut(tmp_path, public, seed=4))
    for shard in PLACED[1:]:
        rows = rows_of(DatasetSlice("", "", shard.public_start, shard.public_stop, 4), 40).tolist()
        assert shards[shard.name] == [rows, rows]
    labels = tmp_path / "data" / "labels.npy"
    np.save(labels, np.arange(100, 140, dtype=np.int32))
    after = content(cut(tmp_path, replace(public, labels_sha256=hash_file(labels))))
    for name, (samples, _) in before.items():
        assert after[name] == [samples, [sample + 100 for sample in samples]]


def test_only_nodes_that_read_public_samples_get_a_shard(tmp_path: Path, public: DatasetInfo) -> None:
    placed = place_shards({"host": 20, "csd0": 4, "csd1": 3}, {"csd1": 40}, 40)
    job = Job("model.keras", Data(HostData(tmp_path)), Recipe(seed=9))
    assert set(cut_shards(placed, public, job, ProjectDirectory(tmp_path))) == {"csd0"}
    assert not cut_shards(
        placed, public, replace(job, data=Data(HostData(tmp_path, "every-node"))), ProjectDirectory(tmp_path)
    )


def send_nothing(progress: DeliveryProgress) -> None:
    raise AssertionError("nothing can be sent")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"code.py", "notes.txt"}),
        ({"ignored": ["*.txt", *DEFAULT_IGNORED]}, {"code.py"}),
        ({"ignored": []}, {"code.py", "notes.txt", ".git/config"}),
    ],
)
def test_files_of_a_tree_and_failing_node(tmp_path: Path, options: dict[str, Any], names: set[str]) -> None:
    tree = tmp_path / "tree"
    (tree / ".git").mkdir(parents=True)
    for name in (".git/config", "code.py", "notes.txt"):
        (tree / name).write_text("x")
    packed: list[FileTree] = []
    finished: list[str] = []
    outcomes = deploy.deploy(
        Path("job.yaml"),
        Fleet((Node("csd0", "127.0.0.1", port=1),)),
        tmp_path,
        list[str]().append,
        trees=[str(tree)],
        on_tree=lambda _, tree: packed.append(tree),
        on_progress=send_nothing,
        on_done=lambda outcome: finished.append(outcome.name),
        **options,
    )
    assert {name for name, _ in packed[0].files} == names
    assert isinstance(outcomes["csd0"].error, UnreachableError)
    assert finished == ["csd0"]


MODEL = """
import keras
import sizes


def build(units=1):
    parts = [keras.Input((size,), name=name) for name, size in sizes.SIZES]
    model = keras.Model(parts, keras.layers.Dense(units)(keras.layers.Concatenate()(parts)))
    model.compile("sgd", "mse")
    return model
"""
SIZES = 'SIZES = (("title", 9), ("body", 5), ("tags", 7))\n'


class Building(Exception):
    """A model is built."""


def serialize(
    job: Job, on_build: Callable[[], None] = lambda: None, shapes: SampleShapes | None = None
) -> SerializedModel:
    project = ProjectDirectory(job.path.parent)
    with closing(LocalSession(HOST_NAME, project.root)) as host:
        return model_files.serialize_model(
            job, model_files.store_worker(project), host, project, shapes, on_build
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, SerializedModel]:
    """A job whose model was built, and that model."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "model.py").write_text(MODEL)
    (directory / "sizes.py").write_text(SIZES)
    (directory / "data.npz").touch()
    (directory / "start.keras").write_text("weights")
    (directory / "parts" / "deep").mkdir(parents=True)
    (directory / "parts" / "deep" / "part.py").write_text("SIZE = 1\n")
    (directory / "parts" / "words.txt").touch()
    (directory / "job.yaml").write_text(
        "model: model.py:build\ncode: [parts]\ndata: {public: {path: data.npz}}\nrecipe: {epochs: 1}\n"
    )
    job = load_job(directory / "job.yaml")
    return job, serialize(job)


def fail() -> None:
    raise Building


def test_unchanged_model_is_not_built_again_and_keeps_its_inputs(built: tuple[Job, SerializedModel]) -> None:
    job, model = built
    assert list(model.info.inputs) == ["title", "body", "tags"]
    assert serialize(job, fail) == model


@pytest.mark.parametrize(
    "change",
    [
        {"model_args": {"units": 2}},
        {"model": "model.py:build_large"},
        {"code": ()},
        "model.py",
        "sizes.py",
        "parts/deep/part.py",
        "start.keras",
        ".csdctl/models/*/architecture.json",
        ".csdctl/models/*/weights.npz",
    ],
    ids=str,
)
def test_model_of_changed_parts_is_built_again(
    built: tuple[Job, SerializedModel], change: str | dict[str, Any]
) -> None:
    job, _ = built
    [path] = job.path.parent.glob(change) if isinstance(change, str) else [job.path]
    before, times = path.read_bytes(), path.stat()
    try:
        if isinstance(change, str):
            path.write_bytes(before[:-1] + b"#")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        else:
            job = replace(job, **change)
        with pytest.raises(Building):
            serialize(job, fail)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("name", "other"), [("pack_worker", lambda: b"another worker"), ("version", lambda package: "3.99.0")]
)
def test_model_is_built_again_by_another_csdctl_or_keras(
    built: tuple[Job, SerializedModel],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    other: Callable[..., object],
) -> None:
    job, _ = built
    with pytest.raises(Building):
        serialize(job, fail, {"": ("float32", (4,))})  # for data of other shapes
    monkeypatch.setattr(f"csdctl.workflows.data.files.{name}", other)
    with pytest.raises(Building):
        serialize(job, fail)


def test_shapes_are_those_that_a_model_is_called_with() -> None:
    def shapes(dtype: str, shape: tuple[int, ...] = ()) -> SampleShapes:
        return shapes_of(DatasetInfo("data", 1, shape, dtype, (), 0, "f"))

    assert shapes("uint8", (8, 8, 3)) == {"": ("float32", (8, 8, 3))}
    assert shapes("float16", (4,)) == {"": ("float32", (4,))}
    assert shapes("int32", (4,)) == {"": ("int32", (4,))}
    assert shapes('[["a", "uint8", [2]], ["b", "int64", []]]') == {"a": ("float32", (2,)), "b": ("int64", ())}
