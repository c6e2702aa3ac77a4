"""A model over prepared samples: features, results, views; interruptions, damage, refusals, what is sent."""

import base64
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.forward import to_results
from csdctl.worker.ingest.extract import LINE_BYTES, extract, send
from csdctl.worker.ingest.sources.source import IngestLimits
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.features import (
    RESULT_STORE,
    SIGMOID,
    SOFTMAX,
    VALUES,
    Augmented,
    Extracted,
    ExtractSpec,
    Recomputed,
    ResultRule,
    SendSpec,
)
from csdctl.worker.protocol.json_codec import ProtocolError, from_json, to_json
from tests.unit.worker.compute.built_models import keras
from tests.unit.worker.ingest.prepared_data import (
    NUM_SAMPLES,
    InterruptionError,
    extract_spec,
    sha256,
    stored,
    swap,
)

NUM_VIEWS = 3
SMALL_BLOCKS = IngestLimits(block_samples=16, sync_interval_s=0)
CLASSES, ALL = (ResultRule("", SOFTMAX),), (ResultRule("", VALUES),)


def recomputed(spec: ExtractSpec, num_rows: int = 1000) -> Recomputed:
    found = extract(replace(spec, num_checked=num_rows))
    assert found.parts == ()
    assert found.checked is not None
    return found.checked


def of_another_model(rows: Path, spec: ExtractSpec) -> None:
    """Put the features of another model in the place of this one's, described as before."""
    description = (rows / "dataset.json").read_text()
    other = extract_spec(rows.parents[1] / "other", keras().layers.Dense(5))
    (found,) = extract(replace(other, store=spec.store)).parts
    shutil.rmtree(rows)
    shutil.move(found.path, rows)
    (rows / "dataset.json").write_text(description)


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows, _: swap(rows / "images.npy"),
        lambda rows, _: swap(rows / "labels.npy"),
        lambda rows, _: (rows / "dataset.json").unlink(),
        of_another_model,
    ],
)
def test_damaged_or_foreign_features_are_computed_again(
    tmp_path: Path, damage: Callable[[Path, ExtractSpec], None]
) -> None:
    spec = extract_spec(tmp_path)
    first = extract(spec)
    assert extract(spec) == Extracted(first.parts, 0)
    damage(Path(first.parts[0].path), spec)
    assert extract(spec) == Extracted(first.parts, NUM_SAMPLES)


def with_infinite_weights(spec: ExtractSpec) -> ExtractSpec:
    weights = [np.full((6, 5), np.inf, np.float32), np.zeros(5, np.float32)]
    return extract_spec(Path(spec.store).parent, keras().layers.Dense(5), weights=weights)


def edited(spec: ExtractSpec, path: str, edit: Callable[[Path], None]) -> ExtractSpec:
    edit(Path(path))
    return spec


REFUSALS: dict[str, tuple[Callable[[ExtractSpec], ExtractSpec], str, str]] = {
    "no weights": (
        lambda spec: edited(spec, spec.prefix.weights, Path.unlink),
        "cannot be read",
        "run `csdc",
    ),
    "other samples": (
        lambda spec: edited(spec, spec.source.images, swap),
        "is not what was prepared",
        "run `csdctl prepare`",
    ),
    "infinite weights": (
        with_infinite_weights,
        "the model's frozen part computes values that are not finite",
        "check its weights and recipe.input_range",
    ),
    "no layer": (lambda spec: replace(spec, results=ALL, layer="hiden"), "no layer hiden", "--layer"),
}


@pytest.mark.parametrize(("change", "message", "remedy"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_is_one_sentence_with_a_remedy(
    tmp_path: Path, change: Callable[[ExtractSpec], ExtractSpec], message: str, remedy: str
) -> None:
    spec = change(extract_spec(tmp_path))
    with pytest.raises(WorkerError) as refused:
        extract(spec)
    assert message in refused.value.message
    assert "\n" not in refused.value.message
    assert remedy in refused.value.remedy


class TestResults:
    @pytest.fixture
    def spec(self, tmp_path: Path) -> ExtractSpec:
        layers = keras().layers
        keras().utils.set_random_seed(1)
        head = layers.Dense(3, activation="softmax")
        spec = extract_spec(tmp_path, layers.Dense(5, "relu", name="hidden"), head)
        return replace(spec, results=CLASSES)

    def test_killed_twice_stores_each_row_once(
        self, spec: ExtractSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = []

        def note(progress: PrepareProgress) -> None:
            done.append(progress.num_done)
            if len(done) in (3, 5):
                raise InterruptionError

        for _ in range(2):
            with pytest.raises(InterruptionError):
                extract(spec, limits=SMALL_BLOCKS, on_progress=note)
        (found,) = extract(spec, limits=SMALL_BLOCKS, on_progress=note).parts
        assert done == [0, 16, 32, 32, 48, 48, 64, 70]
        scores = stored(extract(replace(spec, results=ALL)).parts[0])["value"]
        assert stored(found)["class"].tolist() == scores.argmax(axis=1).tolist()
        np.testing.assert_allclose(stored(found)["probability"], scores.max(axis=1), rtol=1e-6)
        assert found.label_shape == (0,)  # labels are not a part of results
        # What is stored is found without TensorFlow.
        monkeypatch.setattr("csdctl.worker.ingest.extract.load_backend", lambda _: pytest.fail("computed"))
        assert extract(spec).parts == (found,)

    @pytest.mark.parametrize(
        ("outputs", "rule", "classes", "probabilities"),
        [
            ([[0.2, 0.8], [0.9, 0.1]], ResultRule("", SOFTMAX), [1, 0], [0.8, 0.9]),
            ([[0.0, np.log(3)]], ResultRule("", SOFTMAX, from_logits=True), [1], [0.75]),
            ([[0.3], [0.6]], ResultRule("", SIGMOID), [0, 1], [0.7, 0.6]),
            ([0.3, 0.6], ResultRule("", SIGMOID), [0, 1], [0.7, 0.6]),
            ([[-np.log(4)]], ResultRule("", SIGMOID, from_logits=True), [0], [0.8]),
            ([[0.3, 0.6]], ResultRule("", SIGMOID), [1], [0.6]),
            ([[1000.0, -1000.0]], ResultRule("", SOFTMAX, from_logits=True), [0], [1.0]),
        ],
    )
    def test_classes_and_probabilities(
        self, outputs: list[Any], rule: ResultRule, classes: list[int], probabilities: list[float]
    ) -> None:
        records = to_results([np.array(outputs)], [rule])
        assert records["class"].tolist() == classes
        assert records["probability"].tolist() == pytest.approx(probabilities)
        with pytest.raises(WorkerError, match="has 2 outputs, expected 1"):
            to_results([np.zeros((1, 1))] * 2, [rule])


CONTENT = np.random.default_rng(0).bytes(3 * LINE_BYTES + 5)
NAME, HASH = "ab" * 32, hashlib.sha256(CONTENT).hexdigest()


def test_stored_results_are_sent_in_lines(tmp_path: Path) -> None:
    (tmp_path / RESULT_STORE / NAME).mkdir(parents=True)
    (tmp_path / RESULT_STORE / NAME / "images.npy").write_bytes(CONTENT)
    lines = list[str]()
    send(SendSpec(NAME, HASH, len(CONTENT)), lines.append, home=tmp_path)
    assert len(lines) == 4
    assert b"".join(map(base64.b64decode, lines)) == CONTENT
    with pytest.raises(WorkerError, match="cannot be read: FileNotFoundError"):
        send(SendSpec("0" * 64, HASH, len(CONTENT)), lines.append, home=tmp_path)


@pytest.mark.parametrize("name", ["../data/x", "/etc", "ab", "AB" * 32, NAME + "\n"])
def test_nothing_but_results_can_be_requested(name: str) -> None:
    with pytest.raises(ProtocolError, match="fingerprint: expected a SHA-256 in hex"):
        from_json(SendSpec, to_json(SendSpec(name, HASH, 1)))


class TestViews:
    """Features of what `data.augment` makes of each sample, how epochs read them; stored rows again."""

    @pytest.fixture
    def spec(self, tmp_path: Path) -> ExtractSpec:
        """Return a request for features that are the samples themselves."""
        (tmp_path / "functions.py").write_text(
            "def scale(samples, labels, rng):\n    return samples * rng.random(), labels\n"
        )
        layer = keras().layers.Dense(6, use_bias=False)
        return extract_spec(tmp_path, layer, weights=[np.eye(6, dtype=np.float32)])

    @staticmethod
    def views(spec: ExtractSpec) -> ExtractSpec:
        reference = f"{Path(spec.store).parent / 'functions.py'}:scale"
        return replace(spec, augmented=Augmented(reference, 5, NUM_VIEWS))

    def test_views_are_what_the_function_makes_of_each_sample(self, spec: ExtractSpec) -> None:
        found = extract(self.views(spec))
        assert found.num_computed == found.parts[0].num_samples == NUM_VIEWS * NUM_SAMPLES
        ratios = stored(found.parts[0]) / np.tile(np.load(spec.source.images), (NUM_VIEWS, 1))
        assert np.ptp(ratios, axis=1).max() < 1e-4, "one number for each sample"
        assert len(np.unique(ratios[:, 0].round(6))) == NUM_VIEWS * NUM_SAMPLES, "each drawn apart"
        labels = np.load(Path(found.parts[0].path, "labels.npy"))
        assert labels.tolist() == NUM_VIEWS * list(range(NUM_SAMPLES))

    def test_interrupted_views_go_on_with_the_same_draws(self, spec: ExtractSpec, tmp_path: Path) -> None:
        wanted, count = self.views(spec), 0

        def note(_: PrepareProgress) -> None:
            nonlocal count
            count += 1
            if count in (3, 9):
                raise InterruptionError

        for _ in range(2):
            with pytest.raises(InterruptionError):
                extract(wanted, limits=SMALL_BLOCKS, on_progress=note)
        again = extract(wanted)
        assert again.num_computed < NUM_VIEWS * NUM_SAMPLES
        whole = extract(replace(wanted, store=str(tmp_path / "other")))
        assert again.parts[0].images_sha256 == whole.parts[0].images_sha256

    @pytest.mark.parametrize("num_rows", [1, 1000])
    def test_stored_rows_are_computed_again_bit_by_bit(self, spec: ExtractSpec, num_rows: int) -> None:
        """Also those in the last batch, which is not full, and those of later views."""
        assert recomputed(spec) == Recomputed(0, 0.0)
        assert not Path(spec.store).exists()
        for wanted in (spec, self.views(spec)):
            extract(wanted)
            found = recomputed(wanted, num_rows)
            assert found.difference == 0
            assert found.num_rows >= min(num_rows, 32)
        assert (found.num_rows == NUM_VIEWS * NUM_SAMPLES) is (num_rows == 1000)

    def test_stored_rows_of_a_faulty_machine_are_found(self, spec: ExtractSpec) -> None:
        """Its files have the hashes that were stored: what was computed was wrong."""
        info = extract(spec).parts[0]
        rows, file = stored(info), Path(info.path, "images.npy")
        rows[NUM_SAMPLES - 1, 0] += 0.25 * np.abs(rows).max()
        np.save(file, rows)
        Path(info.path, "dataset.json").write_text(to_json(replace(info, images_sha256=sha256(file))))
        assert recomputed(spec).difference > 0.1
