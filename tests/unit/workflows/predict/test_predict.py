"""What `predict` refuses and chooses, and which rows of what machines predict are written.

The worker is scripted: what it predicts of a sample is the sample's number."""

import csv
import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.job.model import load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import StoredFile, hash_file, store_bytes
from csdctl.worker.ingest.extract import send
from csdctl.worker.protocol import features as features
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.events import Failed, Finished
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, VALUES, ResultRule
from csdctl.worker.protocol.json_codec import RESULT, from_json, to_frame
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.workflows.data.files import SerializedModel
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.predict import predict as prediction
from csdctl.workflows.predict.predict import CLASSES, PredictRequest, ResultBlock, build_rules, write_results
from csdctl.workflows.workspace.event_stream import EventStream
from tests.fake_session import FakeConversation, FakeSession, ScriptedResponse
from tests.unit.runs.manifests import manifest_of, write_events

NUM_PUBLIC, NUM_VALIDATION, NUM_PRIVATE = 50, 11, 3
NODES = ("csd0", "csd1")
FIELDS = '[["class", "int32", []], ["probability", "float32", []]]'


Lie = Callable[..., dict[str, Any]]
"""Makes the rows that a machine stores, and what it says of them."""


class OneAnswer(FakeConversation):
    """A worker, which ends when it has answered its request."""

    def send_line(self, line: str) -> None:
        super().send_line(line)
        self.wait(deadline_s=0.0)


class Machine(FakeSession):
    """A machine; its answer is changed by `lie`."""

    def __init__(self, home: Path, name: str, lie: Lie = dict) -> None:
        super().__init__(name)
        self._home, self._lie = home, lie

    def converse(self, command: Sequence[str]) -> FakeConversation:
        replies = {"extract": self._extract, "send": self._send}[command[-1]]
        return OneAnswer(self.name, tuple(command), ScriptedResponse(tuple(command), replies=replies))

    def _extract(self, line: str) -> list[str]:
        spec = from_json(features.ExtractSpec, line)
        samples = np.load(spec.source.images)
        results = np.zeros(len(samples), [("class", np.int32), ("probability", np.float32)])
        results["class"] = samples
        fingerprint = hashlib.sha256(line.encode()).hexdigest()
        path = self._home / spec.store / fingerprint / "images.npy"
        path.parent.mkdir(parents=True)
        lie = self._lie(rows=results)
        np.save(path, lie.pop("rows"), allow_pickle=True)
        described = {"dtype": FIELDS, "fingerprint": fingerprint}
        info = replace(describe(path.parent, len(samples)), **(described | lie))
        return [to_frame(RESULT, features.Extracted((info,), len(samples) - 1))]

    def _send(self, line: str) -> list[str]:
        lines: list[str] = []
        send(from_json(features.SendSpec, line), lines.append, home=self._home)
        return [*(f"@csdctl-data {text}" for text in lines), to_frame(RESULT, {})]


def write(directory: Path, count: int) -> DatasetInfo:
    """Write samples that are their own numbers."""
    directory.mkdir()
    for name in ("images.npy", "labels.npy"):
        np.save(directory / name, np.arange(count, dtype=np.int32))
    return describe(directory, count)


def describe(directory: Path, count: int) -> DatasetInfo:
    sha256 = hash_file(directory / "images.npy")
    return DatasetInfo(
        str(directory), count, (), "int32", (), -1, "ab" * 32, images_sha256=sha256, label_dtype="int32"
    )


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    file = store_bytes(b"worker and model", ".npz", tmp_path)
    model = SerializedModel(ModelInfo("model.keras", {}, 1, 1), file, file)
    public, validation = write(tmp_path / "public", NUM_PUBLIC), write(tmp_path / "test", NUM_VALIDATION)
    private = {node: write(tmp_path / node, NUM_PRIVATE) for node in NODES}
    return Prepared(file, model, public, validation, private)


OPEN_JOB = "model: trained.keras\ndata: {public: {path: public}}\nrecipe: {epochs: 1}\n"
JOB = OPEN_JOB.replace("}}", "}, private: {path: /data/private}}")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "trained.keras").write_bytes(b"PK\x05\x06" + bytes(18))
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "open.yaml").write_text(OPEN_JOB)
    return tmp_path


@pytest.fixture
def request_of_all(project: Path) -> PredictRequest:
    fleet = Fleet(tuple(Node(node, "10.0.0.1") for node in NODES))
    job, model = load_job(project / "open.yaml"), project / "trained.keras"
    wanted = (prediction.PUBLIC, prediction.VALIDATION, prediction.PRIVATE)
    return PredictRequest(job, model, fleet, project, project / "a.csv", wanted, CLASSES)


@pytest.fixture
def predict(
    request_of_all: PredictRequest, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Lie], tuple[list[ResultBlock], dict[str, CsdctlError]]]:
    """Predict all data sets where csd1 lies."""
    monkeypatch.setattr("csdctl.workflows.predict.predict.deploy_files", lambda *_: None)

    def run(lie: Lie) -> tuple[list[ResultBlock], dict[str, CsdctlError]]:
        request, root = request_of_all, request_of_all.directory
        sessions = {name: Machine(root, name) for name in (HOST_NAME, "csd0")}
        sessions["csd1"] = Machine(root, "csd1", lie)
        state = SimpleNamespace(state=root)
        space: Any = SimpleNamespace(fleet=request.fleet, facts={}, sessions=sessions, project=state)
        return prediction.Prediction(request, prepared, space, (ResultRule("", SOFTMAX),)).run(EventStream())

    return run


SETS = [
    (prediction.PUBLIC, HOST_NAME),
    (prediction.VALIDATION, HOST_NAME),
    (prediction.PRIVATE, "csd0"),
    (prediction.PRIVATE, "csd1"),
]
COUNTS = [NUM_PUBLIC, NUM_VALIDATION, NUM_PRIVATE, NUM_PRIVATE]


def test_each_row_comes_once_in_the_order_of_machines_and_data_sets(predict: Any) -> None:
    found, failed = predict(dict)
    assert failed == {}
    assert [(one.data, one.node) for one in found] == SETS
    for one, count in zip(found, COUNTS, strict=True):
        assert one.rows.tolist() == one.fields["class"].tolist() == list(range(count))
    assert [one.num_computed for one in found] == [count - 1 for count in COUNTS]


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda rows: {"rows": rows, "num_samples": 4}, "received 4 rows .* expected 3"),
        (lambda rows: {"rows": rows, "sample_shape": (2,)}, "received 3 rows"),
        (lambda rows: {"rows": rows, "dtype": "float32"}, "expected 3 of class, probability"),
        (lambda rows: {"rows": rows, "dtype": FIELDS.replace("[]", "[9]", 1)}, "received 3 rows"),
        (lambda rows: {"rows": rows[:2]}, "a file with other content, expected 3 rows"),
        (lambda rows: {"rows": rows["probability"]}, "a file with other content"),
        (lambda rows: {"rows": np.array([{}] * 3, object)}, "a file with other content"),
    ],
)
def test_false_answer_of_a_node_loses_its_rows_alone(predict: Any, lie: Lie, said: str) -> None:
    found, failed = predict(lie)
    assert [(one.data, one.node) for one in found] == SETS[:-1]
    assert re.search(said, failed["csd1"].message)


@pytest.mark.parametrize(
    ("on", "job", "expected"),
    [
        (None, "job.yaml", ("private",)),
        (None, "open.yaml", ("public",)),
        ("public", "job.yaml", ("public",)),
        ("all", "job.yaml", ("public", "private")),
    ],
)
def test_chosen_data(project: Path, on: str | None, job: str, expected: tuple[str, ...]) -> None:
    assert prediction.choose_data(on, load_job(project / job)) == expected
    with pytest.raises(InputError, match="has no validation data"):
        prediction.choose_data("validation", load_job(project / job))


def test_model_of_a_run_comes_with_its_job(project: Path) -> None:
    directory = ProjectDirectory(project)
    run = directory.new_run()
    with pytest.raises(InputError, match="has no model.keras") as refused:
        prediction.find_model(run.run_id, None, directory)
    assert f"--resume {run.run_id}" in refused.value.remedy
    failed = directory.new_run()
    failed.save_manifest(manifest_of())
    write_events(failed, [Failed(1, "csd0", "out of memory")])
    run.model.write_bytes(b"")
    run.save_manifest(manifest_of() | {"job": {"path": "job.yaml"}})
    write_events(run, [Finished(rank, node, 1, 1, "", 1) for rank, node in enumerate(("host", "csd0"))])
    with pytest.raises(InputError, match="has no model.keras: it has completed, but the file is damaged"):
        prediction.find_model(run.run_id, None, directory)
    zipfile.ZipFile(run.model, "w").close()
    manifest = run.load_manifest()
    with pytest.raises(InputError, match="it failed: csd0: out of memory") as refused:
        prediction.find_model("latest", None, directory)
    assert refused.value.remedy.endswith(f"the latest run with a model: {run.run_id}")
    shutil.rmtree(failed.path)
    for name in (run.run_id, run.run_id[:10], "latest"):
        assert prediction.find_model(name, None, directory) == (
            run.model.resolve(),
            project / "job.yaml",
            manifest,
        )
    other = project / "open.yaml"
    assert prediction.find_model("latest", other, directory) == (run.model.resolve(), other, manifest)


def test_model_of_a_run_gets_its_inputs_scaled_as_in_training(request_of_all: PredictRequest) -> None:
    assert request_of_all.model_job.recipe.input_range == (0.0, 1.0)
    for of_run in (None, [-1.0, 1.0]):
        request = replace(request_of_all, manifest={"recipe": {"input_range": of_run}})
        assert request.model_job.recipe.input_range == (of_run and tuple(of_run))


def info(*outputs: OutputInfo) -> ModelInfo:
    return ModelInfo("model.keras", {"": (8,)}, 1, 1, outputs=outputs)


@pytest.mark.parametrize(
    ("activation", "loss", "from_logits", "expected"),
    [
        ("softmax", "", False, (SOFTMAX, False)),
        ("sigmoid", "binary_crossentropy", False, (SIGMOID, False)),
        ("linear", "sparse_categorical_crossentropy", True, (SOFTMAX, True)),
        ("linear", "binary_crossentropy", True, (SIGMOID, True)),
        ("linear", "mean_squared_error", False, (VALUES, False)),
        ("", "", False, (VALUES, False)),
    ],
)
def test_rule_of_an_output(activation: str, loss: str, from_logits: bool, expected: tuple[str, bool]) -> None:
    size = 1 if expected[0] == SIGMOID else 4
    (rule,) = build_rules(info(OutputInfo("", (size,), activation, loss, from_logits=from_logits)), CLASSES)
    assert (rule.kind, rule.from_logits) == expected


def test_several_labels_of_a_sample_are_not_one_class() -> None:
    output = OutputInfo("tags", (5,), "sigmoid", "binary_crossentropy")
    with pytest.raises(InputError, match="tags has 5 probabilities that do not exclude each other"):
        build_rules(info(output), CLASSES)
    (rule,) = build_rules(info(replace(output, loss="sparse_categorical_crossentropy")), CLASSES)
    assert rule.kind == SIGMOID


def test_each_output_has_fields_of_its_own_and_classes_of_pixels_are_refused() -> None:
    outputs = (OutputInfo("kind", (4,), "softmax", ""), OutputInfo("size", (1,), "linear", "mse"))
    rules = build_rules(info(*outputs), CLASSES)
    fields = [name for rule in rules for name in rule.fields]
    assert fields == ["kind.class", "kind.probability", "size.value"]
    assert [rule.kind for rule in build_rules(info(*outputs), prediction.SCORES)] == [VALUES, VALUES]
    assert build_rules(info(*outputs), prediction.EMBEDDINGS) == (ResultRule("", VALUES),)
    with pytest.raises(InputError, match="8×8×4") as refused:
        build_rules(info(OutputInfo("", (8, 8, 4), "softmax", "")), CLASSES)
    assert "--want scores" in refused.value.remedy


@pytest.mark.parametrize(
    ("architecture", "remedy"),
    [
        ('{"config": {"layers": [{"config": {"name": "pooled"}}]}}', "such as pooled"),
        ('{"config": {"units": 3}}', "only models with a graph"),
    ],
)
def test_layer_that_the_model_lacks_is_refused(tmp_path: Path, architecture: str, remedy: str) -> None:
    (tmp_path / "model.json").write_text(architecture)
    file = StoredFile("a" * 64 + ".json", tmp_path / "model.json", 0)
    with pytest.raises(InputError, match="has no layer 'pool'") as refused:
        prediction.check_layer("pool", SerializedModel(info(), file, file))
    assert remedy in refused.value.remedy


NAMES = ["cat", "dog"]


def classes(node: str, values: list[int]) -> ResultBlock:
    fields = {
        "class": np.array(values, np.int32),
        "probability": np.array([0.1 + value for value in values], np.float32),
    }
    return ResultBlock("private", node, np.arange(len(values)), fields)


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_classes_have_names_where_these_are_known(tmp_path: Path) -> None:
    blocks = [classes("csd0", [1]), classes("csd1", [0, 1])]
    write_results(tmp_path / "named.csv", blocks, NAMES)
    assert read(tmp_path / "named.csv") == [
        ["data", "node", "row", "class", "class_name", "probability"],
        ["private", "csd0", "0", "1", "dog", "1.1"],
        ["private", "csd1", "0", "0", "cat", "0.1"],
        ["private", "csd1", "1", "1", "dog", "1.1"],
    ]
    write_results(tmp_path / "more.csv", [classes("csd0", [2])], NAMES)
    assert read(tmp_path / "more.csv")[1][3:5] == ["2", ""]
    write_results(tmp_path / "plain.csv", blocks, [])
    assert read(tmp_path / "plain.csv")[0] == ["data", "node", "row", "class", "probability"]


def test_vectors_have_a_column_for_each_number(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(2, 2, 3) / 7
    block = ResultBlock("public", "host", np.array([4, 9]), {"value": values})
    write_results(tmp_path / "a.csv", [block], NAMES)
    header, *rows = read(tmp_path / "a.csv")
    assert header == ["data", "node", "row", *(f"value_{number}" for number in range(6))]
    assert [row[2] for row in rows] == ["4", "9"]
    assert np.array([row[3:] for row in rows]).astype(np.float32).tolist() == values.reshape(2, 6).tolist()


def test_npz_has_arrays_of_all_rows(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    blocks = [ResultBlock("private", node, np.arange(2), {"value": values}) for node in ("csd0", "csd1")]
    write_results(tmp_path / "a.npz", blocks, NAMES)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert arrays["node"].tolist() == ["csd0", "csd0", "csd1", "csd1"]
        assert arrays["row"].tolist() == [0, 1, 0, 1]
        assert arrays["value"].tolist() == [*values.tolist(), *values.tolist()]
        assert arrays["class_names"].tolist() == NAMES


def test_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("earlier")
    broken = ResultBlock("private", "csd1", np.arange(3), {"class": np.zeros(2, np.int32)})
    with pytest.raises(ValueError, match="reshape"):
        write_results(path, [classes("csd0", [1]), broken], [])
    assert path.read_text() == "earlier"
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]
