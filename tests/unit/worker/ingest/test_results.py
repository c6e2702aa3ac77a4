"""Results of a model over prepared samples: what is kept, interruptions, a full disk, and what is sent."""

import base64
import hashlib
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.forward import to_results
from csdctl.worker.compute.model import save_weights
from csdctl.worker.ingest.extract import extract
from csdctl.worker.ingest.gather import LINE_BYTES, send
from csdctl.worker.ingest.sources.source import IngestLimits
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.features import (
    RESULT_STORE,
    SIGMOID,
    SOFTMAX,
    VALUES,
    ExtractSpec,
    ResultRule,
    SendSpec,
)
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime

NUM_SAMPLES = 200
SMALL_BLOCKS = IngestLimits(block_samples=48, sync_interval_s=0)
CLASSES = (ResultRule("", SOFTMAX),)


class InterruptionError(Exception):
    """Stands for a killed worker."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with samples, a model, and what the model predicts for them."""
    directory = tmp_path_factory.mktemp("source")
    _, keras = load_backend()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="relu", name="hidden"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    samples = np.random.default_rng(0).normal(size=(NUM_SAMPLES, 6)).astype(np.float32)
    np.save(directory / "images.npy", samples)
    np.save(directory / "labels.npy", np.arange(NUM_SAMPLES, dtype=np.int32))
    np.save(directory / "scores.npy", np.asarray(model(samples)))
    (directory / "model.json").write_text(model.to_json())
    save_weights(directory / "model.npz", model.get_weights())
    return directory


def spec_of(
    source: Path, store: Path, results: tuple[ResultRule, ...] = CLASSES, layer: str = ""
) -> ExtractSpec:
    images, labels = source / "images.npy", source / "labels.npy"
    part = DatasetSlice(str(images), str(labels), images_sha256=sha256(images), labels_sha256=sha256(labels))
    model = Prefix(str(source / "model.json"), str(source / "model.npz"), None)
    return ExtractSpec(part, str(store), model, Runtime(), results, layer)


def stored(info: Any) -> Any:
    return np.load(Path(info.path, "images.npy"))


def test_killed_twice_stores_each_row_once(source: Path, tmp_path: Path) -> None:
    spec, done = spec_of(source, tmp_path / "store"), []

    def note(progress: PrepareProgress) -> None:
        done.append(progress.num_done)
        if len(done) in (3, 5):
            raise InterruptionError

    for _ in range(2):
        with pytest.raises(InterruptionError):
            extract(spec, load_backend, limits=SMALL_BLOCKS, on_progress=note)
    (found,) = extract(spec, load_backend, limits=SMALL_BLOCKS, on_progress=note).parts
    assert done == [0, 48, 96, 96, 144, 144, 192, 200]
    scores = np.load(source / "scores.npy")
    assert stored(found)["class"].tolist() == scores.argmax(axis=1).tolist()
    np.testing.assert_allclose(stored(found)["probability"], scores.max(axis=1), rtol=1e-6)
    assert found.label_shape == (0,)  # labels are not a part of results
    # What is stored is found without TensorFlow.
    assert extract(spec, lambda: pytest.fail("computed again")).parts == (found,)


def test_other_questions_are_computed_anew(source: Path, tmp_path: Path) -> None:
    store, scores = tmp_path / "store", (ResultRule("", VALUES),)
    specs = [spec_of(source, store), spec_of(source, store, scores), spec_of(source, store, scores, "hidden")]
    found = [extract(spec, load_backend).parts[0] for spec in specs]
    assert len({info.fingerprint for info in found}) == len(found)
    assert stored(found[1])["value"].shape == (NUM_SAMPLES, 3)
    assert stored(found[2])["value"].shape == (NUM_SAMPLES, 5)


def test_full_disk_is_one_sentence(source: Path, tmp_path: Path) -> None:
    spec = spec_of(source, tmp_path / "store", (ResultRule("", VALUES),))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(WorkerError, match="cannot be written") as refused:
            extract(spec, load_backend)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.remedy == "free disk space"


def test_layer_that_does_not_exist_is_refused(source: Path, tmp_path: Path) -> None:
    spec = spec_of(source, tmp_path / "store", (ResultRule("", VALUES),), "hiden")
    with pytest.raises(WorkerError, match="no layer hiden") as refused:
        extract(spec, load_backend)
    assert "--layer" in refused.value.remedy


def test_samples_that_do_not_fit_the_model_are_an_error(source: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((4, 7), np.float32))
    np.save(tmp_path / "labels.npy", np.zeros(4, np.int32))
    for name in ("model.json", "model.npz"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    with pytest.raises(ValueError, match="incompatible"):
        extract(spec_of(tmp_path, tmp_path / "store"), load_backend)


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
    outputs: list[Any], rule: ResultRule, classes: list[int], probabilities: list[float]
) -> None:
    records = to_results([np.array(outputs)], [rule])
    assert records["class"].tolist() == classes
    assert records["probability"].tolist() == pytest.approx(probabilities)


def test_number_of_outputs_is_checked() -> None:
    with pytest.raises(WorkerError, match="has 2 outputs, expected 1"):
        to_results([np.zeros((1, 1))] * 2, CLASSES)


class TestSending:
    @staticmethod
    def results(store: Path) -> SendSpec:
        content = np.random.default_rng(0).bytes(3 * LINE_BYTES + 5)
        name = "ab" * 32
        (store / RESULT_STORE / name).mkdir(parents=True)
        (store / RESULT_STORE / name / "images.npy").write_bytes(content)
        return SendSpec(name, hashlib.sha256(content).hexdigest(), len(content))

    def test_lines_have_the_whole_file(self, tmp_path: Path) -> None:
        spec, lines = self.results(tmp_path), list[str]()
        sent = send(spec, lines.append, home=tmp_path)
        content = b"".join(map(base64.b64decode, lines))
        assert (len(lines), sent.num_bytes) == (4, len(content))
        assert hashlib.sha256(content).hexdigest() == spec.sha256

    @pytest.mark.parametrize("name", ["../data/secret", "/etc", "ab", "AB" * 32, "ab" * 32 + "\n"])
    def test_nothing_but_results_is_sent(self, tmp_path: Path, name: str) -> None:
        spec, lines = self.results(tmp_path), list[str]()
        with pytest.raises(WorkerError, match="no results have this fingerprint"):
            send(SendSpec(name, spec.sha256, spec.num_bytes), lines.append, home=tmp_path)
        assert lines == []

    def test_changed_results_are_not_sent(self, tmp_path: Path) -> None:
        spec, lines = self.results(tmp_path), list[str]()
        with pytest.raises(WorkerError, match="have changed"):
            send(SendSpec(spec.fingerprint, "0" * 64, spec.num_bytes), lines.append, home=tmp_path)
        assert lines == []
