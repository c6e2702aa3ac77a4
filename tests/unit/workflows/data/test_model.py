"""What is stored of a model that was built, and when it is built again."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest

from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job, load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.workflows.data.model import (
    SampleShapes,
    SerializedModel,
    find_built,
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


def test_inputs_keep_the_order_in_which_data_is_given_to_fit(built: tuple[Job, SerializedModel]) -> None:
    job, model = built
    for one in (model, serialize(job)):
        assert list(one.info.inputs) == ["title", "body", "tags"]


def fail() -> None:
    raise Building


def test_unchanged_model_is_not_built_again(built: tuple[Job, SerializedModel]) -> None:
    job, model = built
    assert serialize(job, fail) == model
    assert find_built(job, job.path.parent) == model.info


def with_arguments(job: Job) -> Job:
    return replace(job, model_args={"units": 2})


def with_another_recipe(job: Job) -> Job:
    return replace(job, recipe=replace(job.recipe, learning_rate=0.5))


def with_another_function(job: Job) -> Job:
    return replace(job, model=job.model.replace(":build", ":build_large"))


def with_another_file(job: Job) -> Job:
    (job.path.parent / "model.py").write_text(MODEL.replace('"mse"', '"mae"'))
    return job


def with_another_module_beside_it(job: Job) -> Job:
    (job.path.parent / "sizes.py").write_text(SIZES.replace("9", "8"))
    return job


def with_a_file_of_its_code(job: Job) -> Job:
    (job.path.parent / "parts" / "deep" / "part.py").write_text("SIZE = 2\n")
    return job


def with_less_code(job: Job) -> Job:
    return replace(job, code=())


def with_damaged_architecture(job: Job) -> Job:
    [architecture] = ProjectDirectory(job.path.parent).models.glob("*/architecture.json")
    architecture.write_bytes(architecture.read_bytes() + b" ")
    return job


def with_damaged_weights(job: Job) -> Job:
    [weights] = ProjectDirectory(job.path.parent).models.glob("*/weights.npz")
    weights.write_bytes(b"damaged")
    return job


@pytest.mark.parametrize(
    "change",
    [
        with_arguments,
        with_another_recipe,
        with_another_function,
        with_another_file,
        with_another_module_beside_it,
        with_a_file_of_its_code,
        with_less_code,
        with_damaged_architecture,
        with_damaged_weights,
    ],
)
def test_model_is_built_again_when_what_it_is_made_of_has_changed(
    built: tuple[Job, SerializedModel], change: Callable[[Job], Job]
) -> None:
    job, _ = built
    files = [job.path.parent / name for name in ("model.py", "sizes.py", "parts/deep/part.py")]
    files += ProjectDirectory(job.path.parent).models.glob("*/*.*")
    before = [path.read_bytes() for path in files]
    try:
        changed = change(job)
        assert find_built(changed, job.path.parent) is None
        with pytest.raises(Building):
            serialize(changed, fail)
    finally:
        for path, content in zip(files, before, strict=True):
            path.write_bytes(content)


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
    monkeypatch.setattr(f"csdctl.workflows.data.model.{name}", other)
    assert find_built(job, job.path.parent) is None
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
