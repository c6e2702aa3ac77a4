"""Features that cannot be computed, or not be found, one row for each case.

A refusal is one sentence with a remedy. What is stored is used only if it is what this model has computed of
these samples; anything else is computed again.
"""

import dataclasses
import hashlib
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.cuts import NoCutError, frozen_cut
from csdctl.worker.compute.model import save_weights
from csdctl.worker.ingest.extract import extract
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.features import Extracted, ExtractSpec
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime
from tests.unit.worker.compute.built_models import keras

NUM_SAMPLES = 70


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_of(*first: Any, is_frozen: bool = True) -> Any:
    """Return a model whose first layers are these and a frozen dense layer."""
    layers = keras().layers
    base = keras().Sequential([keras().Input((6,)), *first, layers.Dense(5)], name="base")
    base.trainable = not is_frozen
    inputs = keras().Input((6,))
    return keras().Model(inputs, layers.Dense(2)(base(inputs)))


def model_with_two_inputs() -> Any:
    inputs = [keras().Input((6,)), keras().Input((6,))]
    return keras().Model(inputs, keras().layers.Dense(2)(keras().layers.Add()(inputs)))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no frozen layer": (lambda: model_of(is_frozen=False), "has no frozen layers at its beginning"),
    "dropout at the beginning": (
        lambda: model_of(keras().layers.Dropout(0.5)),
        "draws random numbers, or changes its state, before its first trainable layer",
    ),
    "noise at the beginning": (
        lambda: model_of(keras().layers.GaussianNoise(0.5)),
        "draws random numbers, or changes its state, before its first trainable layer",
    ),
    "two inputs": (
        model_with_two_inputs,
        "is not a functional model with one input and a single tensor between two layers",
    ),
}


@pytest.mark.parametrize(("build", "reason"), MODELS.values(), ids=MODELS)
def test_model_without_features_says_why(build: Callable[[], Any], reason: str) -> None:
    with pytest.raises(NoCutError) as refused:
        frozen_cut(build(), keras())
    assert str(refused.value) == reason


def spec_in(directory: Path, scale: float = 1.0) -> ExtractSpec:
    """Return samples, a prefix whose weights are `scale`, and an empty store below `directory`."""
    directory.mkdir(exist_ok=True)
    images, labels = directory / "images.npy", directory / "labels.npy"
    np.save(images, np.random.default_rng(0).normal(size=(NUM_SAMPLES, 6)).astype(np.float32))
    np.save(labels, np.arange(NUM_SAMPLES, dtype=np.int32))
    model = keras().Sequential([keras().Input((6,)), keras().layers.Dense(5, name="dense")])
    (directory / "model.json").write_text(model.to_json())
    save_weights(directory / "model.npz", [np.full((6, 5), scale, np.float32), np.zeros(5, np.float32)])
    weights = directory / f"{sha256(directory / 'model.npz')}.npz"
    (directory / "model.npz").rename(weights)
    source = DatasetSlice(
        str(images), str(labels), images_sha256=sha256(images), labels_sha256=sha256(labels)
    )
    prefix = Prefix(str(directory / "model.json"), str(weights), None)
    return ExtractSpec(source, str(directory / "store"), prefix, Runtime())


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def of_another_model(stored: Path, spec: ExtractSpec) -> None:
    """Put the features of another model in the place of this one's."""
    other = dataclasses.replace(spec_in(stored.parents[1] / "other", 2.0), store=spec.store)
    (found,) = extract(other, load_backend).parts
    shutil.rmtree(stored)
    shutil.move(found.path, stored)


def described_as_this_one(stored: Path, spec: ExtractSpec) -> None:
    """Do the same, with a description that names this place."""
    description = json.loads((stored / "dataset.json").read_text())
    of_another_model(stored, spec)
    (stored / "dataset.json").write_text(json.dumps(description))


DAMAGES: dict[str, Callable[[Path, ExtractSpec], None]] = {
    "a changed byte of features": lambda stored, _: overwrite(stored / "images.npy"),
    "a short file of features": lambda stored, _: shorten(stored / "images.npy"),
    "a changed byte of labels": lambda stored, _: overwrite(stored / "labels.npy"),
    "no features": lambda stored, _: (stored / "images.npy").unlink(),
    "no description": lambda stored, _: (stored / "dataset.json").unlink(),
    "half a description": lambda stored, _: shorten(stored / "dataset.json"),
    "features of another model": of_another_model,
    "features of another model under this one's description": described_as_this_one,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_or_foreign_features_are_computed_again(
    tmp_path: Path, damage: Callable[[Path, ExtractSpec], None]
) -> None:
    spec = spec_in(tmp_path)
    first = extract(spec, load_backend)
    assert extract(spec, load_backend) == Extracted(first.parts, 0)
    damage(Path(first.parts[0].path), spec)
    assert extract(spec, load_backend) == Extracted(first.parts, NUM_SAMPLES)


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def without_weights(spec: ExtractSpec) -> ExtractSpec:
    Path(spec.prefix.weights).unlink()
    return spec


def with_other_weights(spec: ExtractSpec) -> ExtractSpec:
    overwrite(Path(spec.prefix.weights))
    return spec


def with_other_samples(spec: ExtractSpec) -> ExtractSpec:
    overwrite(Path(spec.source.images))
    return spec


def with_infinite_weights(spec: ExtractSpec) -> ExtractSpec:
    return spec_in(Path(spec.store).parent, np.inf)


REFUSALS: dict[str, tuple[Any, Any, str, str]] = {
    "disk full": (
        lambda spec: spec,
        full_disk,
        "prepared data cannot be written: File too large",
        "free disk space",
    ),
    "no weights": (without_weights, nullcontext, "cannot be read", "run `csdctl deploy`"),
    "other weights": (with_other_weights, nullcontext, "is not what csdctl sent", "run `csdctl deploy`"),
    "other samples": (with_other_samples, nullcontext, "is not what was prepared", "run `csdctl prepare`"),
    "infinite weights": (
        with_infinite_weights,
        nullcontext,
        "the model's frozen part computes values that are not finite",
        "check its weights and recipe.input_range",
    ),
}


@pytest.mark.parametrize(("change", "around", "message", "remedy"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_is_one_sentence_with_a_remedy(
    tmp_path: Path, change: Any, around: Any, message: str, remedy: str
) -> None:
    spec = change(spec_in(tmp_path))
    with around(), pytest.raises(WorkerError) as refused:
        extract(spec, load_backend)
    assert message in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.remedy.startswith(remedy)
