"""What is stored of a model that was built, and when it is built again."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job, load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.workflows.data.files import (
    SampleShapes,
    SerializedModel,
    serialize_model,
    shapes_of,
    store_worker,
)

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


def serialize(job: Job, on_build: Callable[[], None] = lambda: None) -> SerializedModel:
    project = ProjectDirectory(job.path.parent)
    with closing(LocalSession(HOST_NAME, project.root)) as host:
        return serialize_model(job, store_worker(project), host, project, None, on_build)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, SerializedModel]:
    """A job whose model was built, and that model."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "model.py").write_text(MODEL)
    (directory / "sizes.py").write_text(SIZES)
    (directory / "data.npz").touch()
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


def test_unchanged_model_is_not_built_again_and_keeps_the_order_of_its_inputs(
    built: tuple[Job, SerializedModel],
) -> None:
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
        ".csdctl/models/*/architecture.json",
        ".csdctl/models/*/weights.npz",
    ],
    ids=str,
)
def test_model_is_built_again_when_what_it_is_made_of_has_changed(
    built: tuple[Job, SerializedModel], change: str | dict[str, Any]
) -> None:
    job, _ = built
    [path] = job.path.parent.glob(change) if isinstance(change, str) else [job.path]
    before = path.read_bytes()
    try:
        if isinstance(change, str):
            path.write_bytes(before + b" ")
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
    monkeypatch.setattr(f"csdctl.workflows.data.files.{name}", other)
    with pytest.raises(Building):
        serialize(job, fail)


def test_model_is_built_again_for_data_of_other_shapes(built: tuple[Job, SerializedModel]) -> None:
    job, _ = built
    project = ProjectDirectory(job.path.parent)
    with closing(LocalSession(HOST_NAME, project.root)) as host, pytest.raises(Building):
        serialize_model(job, store_worker(project), host, project, {"": ("float32", (4,))}, fail)


def test_shapes_are_those_that_a_model_is_called_with() -> None:
    def shapes(dtype: str, shape: tuple[int, ...] = ()) -> SampleShapes:
        return shapes_of(DatasetInfo("data", 1, shape, dtype, (), 0, "f"))

    assert shapes("uint8", (8, 8, 3)) == {"": ("float32", (8, 8, 3))}
    assert shapes("float16", (4,)) == {"": ("float32", (4,))}
    assert shapes("int32", (4,)) == {"": ("int32", (4,))}
    assert shapes('[["a", "uint8", [2]], ["b", "int64", []]]') == {
        "a": ("float32", (2,)),
        "b": ("int64", ()),
    }
