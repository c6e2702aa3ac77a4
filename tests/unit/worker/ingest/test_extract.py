"""A model over prepared samples: features, results, views; interruptions, refusals; what is gathered."""

import base64
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.data.prepared import rows_of
from csdctl.worker.engine.forward import to_results
from csdctl.worker.ingest.extract import LINE_BYTES, extract, fingerprint_of, gather, of_sources, send
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol import features
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, ExtractSpec, GatheredPart, ResultRule, SendSpec
from csdctl.worker.protocol.json_codec import ProtocolError, from_json, to_json
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime, UserCode
from tests.unit.worker.compute.built_models import keras
from tests.unit.worker.ingest.prepared_data import (
    NUM_SAMPLES,
    InterruptionError,
    extract_spec,
    sha256,
    slice_of,
    stop_at,
    stored,
    swap,
)

NUM_VIEWS = 3
CLASSES, ALL = (ResultRule("", SOFTMAX),), (ResultRule("", features.VALUES),)


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
def test_damaged_rows_are_computed_again(tmp_path: Path, damage: Callable[[Path, ExtractSpec], None]) -> None:
    spec = extract_spec(tmp_path)
    first = extract(spec)
    assert extract(spec) == features.Extracted(first.parts, 0)
    damage(Path(first.parts[0].path), spec)
    assert extract(spec) == features.Extracted(first.parts, NUM_SAMPLES)


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

    def test_two_kills_leave_each_row_once(self, spec: ExtractSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("csdctl.worker.ingest.partial_dataset.SYNC_INTERVAL_S", 0)
        done = []

        def note(progress: PrepareProgress) -> None:
            done.append(progress.num_done)
            if len(done) in (2, 4):
                raise InterruptionError

        for _ in range(2):
            with pytest.raises(InterruptionError):
                extract(spec, on_progress=note)
        (found,) = extract(spec, on_progress=note).parts
        assert done == [0, 32, 32, 64, 64, 70]
        scores = stored(extract(replace(spec, results=ALL)).parts[0])["value"]
        assert stored(found)["class"].tolist() == scores.argmax(axis=1).tolist()
        np.testing.assert_allclose(stored(found)["probability"], scores.max(axis=1), rtol=1e-6)
        assert found.label_shape == (0,)  # labels are not a part of results
        # What is stored is found without TensorFlow.
        monkeypatch.setattr("csdctl.worker.compute.compile.load", lambda *_: pytest.fail("computed"))
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
    (tmp_path / features.RESULT_STORE / NAME).mkdir(parents=True)
    (tmp_path / features.RESULT_STORE / NAME / "images.npy").write_bytes(CONTENT)
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
        return replace(spec, augmented=features.Augmented(reference, 5, NUM_VIEWS))

    def test_views_are_what_the_function_makes_of_each_sample(self, spec: ExtractSpec) -> None:
        found = extract(self.views(spec))
        assert found.num_computed == found.parts[0].num_samples == NUM_VIEWS * NUM_SAMPLES
        ratios = stored(found.parts[0]) / np.tile(np.load(spec.source.images), (NUM_VIEWS, 1))
        assert np.ptp(ratios, axis=1).max() < 1e-4, "one number for each sample"
        assert len(np.unique(ratios[:, 0].round(6))) == NUM_VIEWS * NUM_SAMPLES, "each drawn apart"
        labels = np.load(Path(found.parts[0].path, "labels.npy"))
        assert labels.tolist() == NUM_VIEWS * list(range(NUM_SAMPLES))

    def test_interrupted_views_go_on(
        self, spec: ExtractSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("csdctl.worker.ingest.partial_dataset.SYNC_INTERVAL_S", 0)
        wanted = self.views(spec)
        for num_done in (32, 96):
            with pytest.raises(InterruptionError):
                extract(wanted, on_progress=stop_at(num_done))
        again = extract(wanted)
        assert again.num_computed <= NUM_VIEWS * NUM_SAMPLES - 96
        whole = extract(replace(wanted, store=str(tmp_path / "other")))
        assert again.parts[0].images_sha256 == whole.parts[0].images_sha256


SEED, ENDS = 7, (0, 25, 26, 26, NUM_SAMPLES)
"""Where the shards of four machines begin and end; one has no samples."""
Lie = Callable[[list[GatheredPart]], list[GatheredPart]]


@pytest.fixture
def wanted(tmp_path: Path) -> ExtractSpec:
    """Return what the host alone would compute: features of all samples, as a rank reads them."""
    spec = extract_spec(tmp_path / "host")
    return replace(spec, source=replace(spec.source, start=0, stop=NUM_SAMPLES, permutation_seed=SEED))


@pytest.fixture
def parts(tmp_path: Path, wanted: ExtractSpec) -> list[GatheredPart]:
    """Return the features of four machines, each of its own shard in a store of its own."""
    found = []
    for number, (start, stop) in enumerate(pairwise(ENDS)):
        rows = rows_of(DatasetSlice("", "", start, stop, SEED), NUM_SAMPLES)
        shard = tmp_path / f"shard{number}"
        shard.mkdir()
        np.save(shard / "images.npy", np.load(wanted.source.images)[rows])
        np.save(shard / "labels.npy", np.load(wanted.source.labels)[rows])
        (info,) = extract(replace(wanted, source=slice_of(shard), store=str(shard / "store"))).parts
        found.append(GatheredPart(f"csd{number}", f"{info.path}/images.npy", info.images_sha256, start, stop))
    return found


def gather_parts(wanted: ExtractSpec, *parts: GatheredPart) -> features.Gathered:
    return gather(features.GatherSpec(wanted, (5,), parts))


def test_extract_finds_gathered_rows(wanted: ExtractSpec, parts: list[GatheredPart], tmp_path: Path) -> None:
    assert gather_parts(wanted) == features.Gathered(is_stored=False)
    assert gather_parts(wanted, *parts) == gather_parts(wanted) == features.Gathered(is_stored=True)
    found, alone = extract(wanted), extract(replace(wanted, store=str(tmp_path / "alone")))
    assert (found.num_computed, alone.num_computed) == (0, NUM_SAMPLES)
    assert [replace(part, path="") for part in found.parts] == [
        replace(part, path="") for part in alone.parts
    ]


def with_values(change: Callable[[Any], Any]) -> Lie:
    """Return what puts other features in place of those of the first machine."""

    def apply(parts: list[GatheredPart]) -> list[GatheredPart]:
        first, *others = parts
        np.save(first.path, change(np.load(first.path)))
        return [replace(first, sha256=sha256(Path(first.path))), *others]

    return apply


LIES: dict[str, tuple[Lie, str]] = {
    "a machine is missing": (lambda parts: parts[1:], "the features of 25 of 70 samples are missing"),
    "another shape": (
        with_values(lambda rows: rows[:, :4]),
        r"csd0 sent float32 of shape \(\d+, 4\), expected",
    ),
    "not finite": (with_values(lambda rows: rows * np.inf), "csd0 sent features that are not finite"),
    "another file": (lambda parts: [replace(parts[0], sha256="0" * 64), *parts[1:]], "SHA-256|not"),
}


@pytest.mark.parametrize(("lie", "said"), LIES.values(), ids=LIES)
def test_lies_are_refused(wanted: ExtractSpec, parts: list[GatheredPart], lie: Lie, said: str) -> None:
    with pytest.raises(WorkerError, match=said):
        gather_parts(wanted, *lie(parts))
    assert gather_parts(wanted) == features.Gathered(is_stored=False)
    assert extract(wanted).num_computed == NUM_SAMPLES


SOURCE = DatasetSlice("images.npy", "labels.npy", 0, 60, 7, "a" * 64, "b" * 64)
PREFIX = Prefix("model.json", "model.npz", (0.0, 1.0), "float32", UserCode("code.zip", ("mine",)))
VIEWS = features.Augmented("/somewhere/functions.py:scale", 5, 3)
SPEC = ExtractSpec(SOURCE, "store", PREFIX, Runtime(), augmented=VIEWS)
RESULTS = replace(SPEC, augmented=None, results=(ResultRule("", SOFTMAX),))

DEPENDS = {
    "samples": replace(SPEC, source=replace(SOURCE, images_sha256="c" * 64)),
    "labels": replace(SPEC, source=replace(SOURCE, labels_sha256="c" * 64)),
    "first row": replace(SPEC, source=replace(SOURCE, start=1)),
    "last row": replace(SPEC, source=replace(SOURCE, stop=59)),
    "permutation": replace(SPEC, source=replace(SOURCE, permutation_seed=8)),
    "architecture": replace(SPEC, prefix=replace(PREFIX, architecture="other.json")),
    "weights": replace(SPEC, prefix=replace(PREFIX, weights="other.npz")),
    "code": replace(SPEC, prefix=replace(PREFIX, code=UserCode("other.zip", ("mine",)))),
    "range": replace(SPEC, prefix=replace(PREFIX, input_range=(-1.0, 1.0))),
    "precision": replace(SPEC, prefix=replace(PREFIX, precision="float16")),
    "no views": replace(SPEC, augmented=None),
    "function": replace(SPEC, augmented=replace(VIEWS, augment="/somewhere/functions.py:keep")),
    "file of the function": replace(SPEC, augmented=replace(VIEWS, augment="/somewhere/other.py:scale")),
    "seed of views": replace(SPEC, augmented=replace(VIEWS, seed=6)),
    "number of views": replace(SPEC, augmented=replace(VIEWS, num_views=4)),
    "results": RESULTS,
    "layer": replace(RESULTS, layer="hidden"),
    "kind of result": replace(RESULTS, results=(ResultRule("", features.VALUES),)),
    "logits": replace(RESULTS, results=(ResultRule("", SOFTMAX, from_logits=True),)),
}


def test_rows_are_found_by_all_that_they_depend_on() -> None:
    found = {name: fingerprint_of(spec) for name, spec in {"itself": SPEC, **DEPENDS}.items()}
    assert len(set(found.values())) == len(found)


def test_rows_are_found_wherever_files_are() -> None:
    for same in (
        replace(SPEC, source=replace(SOURCE, images="elsewhere/images.npy", labels="elsewhere/labels.npy")),
        replace(SPEC, store="elsewhere", runtime=Runtime(8)),
        replace(SPEC, prefix=replace(PREFIX, architecture="/elsewhere/model.json")),
        replace(SPEC, augmented=replace(VIEWS, augment="/elsewhere/functions.py:scale")),
        replace(SPEC, more_sources=(SOURCE,), num_plain=1),
    ):
        assert fingerprint_of(same) == fingerprint_of(SPEC)


def test_rows_of_another_version_of_keras_are_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    found, packages = set(), ("tensorflow", "keras")
    for updated in ("", *packages):
        versions = dict.fromkeys(packages, "1.0") | {updated: "2.0"}
        monkeypatch.setattr("csdctl.worker.protocol.packages.version", versions.__getitem__)
        found.add(fingerprint_of(SPEC))
    assert len(found) == 1 + len(packages)


def test_only_training_samples_have_views() -> None:
    others: Any = tuple(replace(SOURCE, start=start) for start in (1, 2))
    found = of_sources(replace(SPEC, more_sources=others, num_plain=1))
    assert [one.source.start for one in found] == [0, 1, 2]
    assert [one.augmented for one in found] == [VIEWS, VIEWS, None]
