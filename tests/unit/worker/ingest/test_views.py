"""Views: features of what `data.augment` makes of each sample, how epochs read them; stored rows again."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.augment import Augmentation
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.model import save_weights
from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.ingest.extract import extract, recompute
from csdctl.worker.ingest.sources.source import IngestLimits
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.worker.protocol.features import Augmented, Extracted, ExtractSpec, Recomputed
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime
from tests.unit.worker.compute.built_models import keras

NUM_SAMPLES, NUM_VIEWS = 70, 3
SMALL_BLOCKS = IngestLimits(block_samples=16, sync_interval_s=0)
FUNCTIONS = """\
def scale(samples, labels, rng):
    return samples * rng.random(), labels


def keep(samples, labels, rng):
    return samples, labels
"""


class InterruptionError(Exception):
    """Stands for a killed worker."""


@pytest.fixture
def spec(tmp_path: Path) -> ExtractSpec:
    """Samples, a prefix that keeps them as they are, and an empty store."""
    images, labels = tmp_path / "images.npy", tmp_path / "labels.npy"
    np.save(images, np.random.default_rng(0).normal(size=(NUM_SAMPLES, 6)).astype(np.float32))
    np.save(labels, np.arange(NUM_SAMPLES, dtype=np.int32))
    model = keras().Sequential([keras().Input((6,)), keras().layers.Dense(6, use_bias=False)])
    (tmp_path / "model.json").write_text(model.to_json())
    save_weights(tmp_path / "model.npz", [np.eye(6, dtype=np.float32)])
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (images, labels)]
    source = DatasetSlice(str(images), str(labels), images_sha256=hashes[0], labels_sha256=hashes[1])
    prefix = Prefix(str(tmp_path / "model.json"), str(tmp_path / "model.npz"), None)
    return ExtractSpec(source, str(tmp_path / "store"), prefix, Runtime())


def with_views(spec: ExtractSpec, name: str, num_views: int = NUM_VIEWS, seed: int = 5) -> ExtractSpec:
    reference = f"{Path(spec.store).parent / 'functions.py'}:{name}"
    return dataclasses.replace(spec, augmented=Augmented(reference, seed, num_views))


def run(spec: ExtractSpec, **options: Any) -> Extracted:
    return extract(spec, load_backend, **options)


def stored(info: DatasetInfo) -> Any:
    return np.load(Path(info.path, "images.npy"))


def test_one_view_that_changes_nothing_is_the_features_themselves(spec: ExtractSpec) -> None:
    plain, kept = run(spec), run(with_views(spec, "keep", 1))
    assert kept.num_computed == NUM_SAMPLES  # stored apart: another function would make others
    assert (kept.parts[0].images_sha256, kept.parts[0].labels_sha256) == (
        plain.parts[0].images_sha256,
        plain.parts[0].labels_sha256,
    )


def test_views_are_what_the_function_makes_of_each_sample(spec: ExtractSpec) -> None:
    found = run(with_views(spec, "scale"))
    assert found.num_computed == found.parts[0].num_samples == NUM_VIEWS * NUM_SAMPLES
    ratios = stored(found.parts[0]) / np.tile(np.load(spec.source.images), (NUM_VIEWS, 1))
    assert np.ptp(ratios, axis=1).max() < 1e-4, "one number for each sample"
    assert len(np.unique(ratios[:, 0].round(6))) == NUM_VIEWS * NUM_SAMPLES, "each drawn apart"
    labels = np.load(Path(found.parts[0].path, "labels.npy"))
    assert labels.tolist() == NUM_VIEWS * list(range(NUM_SAMPLES))


def test_interrupted_views_go_on_with_the_same_draws(spec: ExtractSpec, tmp_path: Path) -> None:
    wanted, count = with_views(spec, "scale"), 0

    def note(_: PrepareProgress) -> None:
        nonlocal count
        count += 1
        if count in (3, 9):
            raise InterruptionError

    for _ in range(2):
        with pytest.raises(InterruptionError):
            run(wanted, limits=SMALL_BLOCKS, on_progress=note)
    again = run(wanted)
    assert again.num_computed < NUM_VIEWS * NUM_SAMPLES
    whole = run(dataclasses.replace(wanted, store=str(tmp_path / "other")))
    assert again.parts[0].images_sha256 == whole.parts[0].images_sha256


def test_other_views_are_computed_anew(spec: ExtractSpec) -> None:
    wanted = [with_views(spec, "scale"), with_views(spec, "scale", seed=6), with_views(spec, "scale", 2)]
    assert all(run(one).num_computed for one in [spec, *wanted])
    assert [run(one).num_computed for one in [spec, *wanted]] == [0, 0, 0, 0]


def test_validation_samples_have_no_views(spec: ExtractSpec) -> None:
    wanted = dataclasses.replace(with_views(spec, "scale"), others=(spec.source,), num_plain=1)
    training, validation = run(wanted).parts
    assert (training.num_samples, validation.num_samples) == (NUM_VIEWS * NUM_SAMPLES, NUM_SAMPLES)
    np.testing.assert_allclose(stored(validation), np.load(spec.source.images), rtol=1e-6)


def test_epochs_read_the_views_in_turn(spec: ExtractSpec) -> None:
    (info,) = run(with_views(spec, "scale")).parts
    part = DatasetSlice(
        f"{info.path}/images.npy",
        f"{info.path}/labels.npy",
        images_sha256=info.images_sha256,
        labels_sha256=info.labels_sha256,
        num_views=NUM_VIEWS,
    )
    samples, views = PreparedSamples(part), stored(info).reshape(NUM_VIEWS, NUM_SAMPLES, 6)
    assert len(samples) == NUM_SAMPLES
    for epoch in range(2 * NUM_VIEWS):
        samples.set_epoch(epoch)
        found, labels = samples.read(np.arange(NUM_SAMPLES))
        assert np.array_equal(found, views[epoch % NUM_VIEWS])
        assert labels.tolist() == list(range(NUM_SAMPLES))
    with pytest.raises(WorkerError, match="210 rows cannot be 4 views"):
        PreparedSamples(dataclasses.replace(part, num_views=4))


def test_failing_function_is_named(spec: ExtractSpec) -> None:
    with pytest.raises(WorkerError, match="has no function 'missing'"):
        run(with_views(spec, "missing"))
    assert Augmentation(f"{Path(spec.store).parent / 'functions.py'}:keep", 1).name == "functions.py:keep"


def checked(spec: ExtractSpec, num_rows: int) -> Recomputed:
    found = recompute(dataclasses.replace(spec, num_checked=num_rows), load_backend)
    assert found.parts == ()
    assert found.checked is not None
    return found.checked


@pytest.mark.parametrize("num_rows", [1, 64, 1000])
def test_stored_rows_are_computed_again_bit_by_bit(spec: ExtractSpec, num_rows: int) -> None:
    """Also those in the last batch, which is not full, and those of later views."""
    for wanted in (spec, with_views(spec, "scale")):
        run(wanted)
        found = checked(wanted, num_rows)
        assert found.difference == 0
        assert found.num_rows >= min(num_rows, 32)
    if num_rows == 1000:
        assert found.num_rows == NUM_VIEWS * NUM_SAMPLES


def test_features_that_are_not_stored_are_not_computed(spec: ExtractSpec) -> None:
    assert checked(spec, 64) == Recomputed(0, 0.0)
    assert not Path(spec.store).exists()


def test_stored_rows_of_a_faulty_machine_are_found(spec: ExtractSpec) -> None:
    """Its files have the hashes that were stored: what was computed was wrong."""
    info = run(spec).parts[0]
    rows = stored(info)
    largest = np.abs(rows).max()
    rows[NUM_SAMPLES - 1, 0] += 0.25 * largest
    np.save(Path(info.path, "images.npy"), rows)
    new_hash = hashlib.sha256(Path(info.path, "images.npy").read_bytes()).hexdigest()
    Path(info.path, "dataset.json").write_text(to_json(dataclasses.replace(info, images_sha256=new_hash)))
    assert checked(spec, 1000).difference > 0.1
