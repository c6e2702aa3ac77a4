"""Which rows come out of what machines predict.

The worker is scripted: what it predicts of a sample is the sample's number.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.errors import CsdctlError
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.job.model import load_job
from csdctl.shipping.store import hash_file, store_bytes
from csdctl.worker.ingest.extract import send
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.features import SOFTMAX, Extracted, ExtractSpec, ResultRule, SendSpec
from csdctl.worker.protocol.json_codec import RESULT, from_json, to_frame
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.workflows.data.files import SerializedModel
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.predict.predict import (
    CLASSES,
    PRIVATE,
    PUBLIC,
    VALIDATION,
    Block,
    PredictRequest,
    _Prediction,
    list_parts,
)
from tests.fake_session import FakeConversation, FakeSession, ScriptedResponse

NUM_PUBLIC, NUM_VALIDATION, NUM_PRIVATE = 50, 11, 3
NODES = ("csd0", "csd1")


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
        spec = from_json(ExtractSpec, line)
        samples = np.load(spec.source.images)
        results = np.zeros(len(samples), [("class", np.int32), ("probability", np.float32)])
        results["class"] = samples
        fingerprint = hashlib.sha256(line.encode()).hexdigest()
        path = self._home / spec.store / fingerprint / "images.npy"
        path.parent.mkdir(parents=True)
        lie = self._lie(rows=results)
        np.save(path, lie.pop("rows"), allow_pickle=True)
        described = {
            "dtype": json.dumps([["class", "int32", []], ["probability", "float32", []]]),
            "fingerprint": fingerprint,
        }
        info = replace(describe(path.parent, len(samples)), **(described | lie))
        return [to_frame(RESULT, Extracted((info,), len(samples) - 1))]

    def _send(self, line: str) -> list[str]:
        lines: list[str] = []
        send(from_json(SendSpec, line), lines.append, home=self._home)
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
    model = SerializedModel(ModelInfo("model.keras", (), (60,), 1, 1, "softmax"), file, file)
    public, validation = write(tmp_path / "public", NUM_PUBLIC), write(tmp_path / "test", NUM_VALIDATION)
    private = {node: write(tmp_path / node, NUM_PRIVATE) for node in NODES}
    return Prepared(file, model, public, validation, private)


@pytest.fixture
def request_of_all(tmp_path: Path) -> PredictRequest:
    (tmp_path / "trained.keras").write_bytes(b"PK\x05\x06" + bytes(18))
    (tmp_path / "job.yaml").write_text(
        "model: trained.keras\ndata: {public: {path: x}}\nrecipe: {epochs: 1}\n"
    )
    fleet = Fleet(tuple(Node(node, "10.0.0.1") for node in NODES))
    job, model = load_job(tmp_path / "job.yaml"), tmp_path / "trained.keras"
    return PredictRequest(
        job, model, fleet, tmp_path, tmp_path / "a.csv", (PUBLIC, VALIDATION, PRIVATE), CLASSES
    )


@pytest.fixture
def predict(
    request_of_all: PredictRequest, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Lie], tuple[list[Block], dict[str, CsdctlError]]]:
    """Predict all data sets where csd1 lies."""
    monkeypatch.setattr("csdctl.workflows.predict.predict.deploy_files", lambda *_: None)

    def run(lie: Lie) -> tuple[list[Block], dict[str, CsdctlError]]:
        request, root = request_of_all, request_of_all.directory
        sessions = {name: Machine(root, name) for name in (HOST_NAME, "csd0")}
        sessions["csd1"] = Machine(root, "csd1", lie)
        space: Any = SimpleNamespace(fleet=request.fleet, facts={}, sessions=sessions)
        silent: Any = SimpleNamespace(
            say=print, on_delivery=print, preparing=lambda *_, **__: nullcontext(lambda label, progress: None)
        )
        prediction = _Prediction(request, prepared, space, (ResultRule("", SOFTMAX),), root, silent)
        return prediction.run(list_parts(request, prepared))

    return run


SETS = [(PUBLIC, HOST_NAME), (VALIDATION, HOST_NAME), (PRIVATE, "csd0"), (PRIVATE, "csd1")]
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
        (
            lambda rows: {
                "rows": rows,
                "dtype": '[["class", "int32", [9]], ["probability", "float32", []]]',
            },
            "received 3 rows",
        ),
        (lambda rows: {"rows": rows[:2]}, r"of shape \(2,\)"),
        (lambda rows: {"rows": rows["probability"]}, "received float32"),
        (lambda rows: {"rows": np.array([{}] * 3, object)}, "cannot be read: ValueError"),
    ],
)
def test_false_answer_of_a_node_loses_its_rows_alone(predict: Any, lie: Lie, said: str) -> None:
    found, failed = predict(lie)
    assert [(one.data, one.node) for one in found] == SETS[:-1]
    assert re.search(said, failed["csd1"].message)
