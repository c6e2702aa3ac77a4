"""Which rows come out of the parts that machines predict.

The worker is scripted: what it predicts of a sample is the sample's number.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.job.model import load_job
from csdctl.shipping.store import hash_file, store_bytes
from csdctl.worker.data.prepared import rows_of
from csdctl.worker.ingest.gather import send
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.worker.protocol.features import SOFTMAX, Extracted, ExtractSpec, ResultRule, SendSpec
from csdctl.worker.protocol.json_codec import (
    ANSWER_PREFIX,
    DATA_PREFIX,
    PROGRESS_PREFIX,
    from_json,
    to_json,
)
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.run_spec import DatasetSlice, Runtime
from csdctl.workflows.data.deploy import whole
from csdctl.workflows.data.model import SerializedModel
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.predict.division import Part, on_host
from csdctl.workflows.predict.predict import PredictResult, _Prediction
from csdctl.workflows.predict.request import CLASSES, PRIVATE, PUBLIC, VALIDATION, PredictRequest
from csdctl.workflows.predict.writing import Block
from tests.fake_session import FakeConversation, FakeSession, ScriptedResponse

SEED = 7
NUM_PUBLIC, NUM_VALIDATION = 50, 11
NODES = ("csd0", "csd1")


class OneAnswer(FakeConversation):
    """A worker, which ends when it has answered its request."""

    def send_line(self, line: str) -> None:
        super().send_line(line)
        self.wait(deadline_s=0.0)


class Host(FakeSession):
    """The host, on which one row of each part was predicted before."""

    def __init__(self, home: Path, name: str = HOST_NAME) -> None:
        super().__init__(name)
        self._home = home

    def converse(self, command: Sequence[str]) -> FakeConversation:
        replies = {"extract": self._extract, "send": self._send}[command[-1]]
        return OneAnswer(self.name, tuple(command), ScriptedResponse(tuple(command), replies=replies))

    def _extract(self, line: str) -> list[str]:
        spec = from_json(ExtractSpec, line)
        samples = np.load(spec.source.images)
        samples = samples[rows_of(spec.source, len(samples))]
        results = np.zeros(len(samples), [("class", np.int32), ("probability", np.float32)])
        results["class"] = samples
        fingerprint = hashlib.sha256(line.encode()).hexdigest()
        path = self._home / spec.store / fingerprint / "images.npy"
        path.parent.mkdir(parents=True)
        np.save(path, results)
        info = replace(
            describe(path.parent, len(samples)),
            dtype=json.dumps([["class", "int32", []], ["probability", "float32", []]]),
            fingerprint=fingerprint,
        )
        progress = PrepareProgress(1, len(samples))
        return [
            PROGRESS_PREFIX + to_json(progress),
            ANSWER_PREFIX + to_json(Extracted((info,), len(samples) - 1)),
        ]

    def _send(self, line: str) -> list[str]:
        lines: list[str] = []
        sent = send(from_json(SendSpec, line), lines.append, home=self._home)
        return [*(DATA_PREFIX + text for text in lines), ANSWER_PREFIX + to_json(sent)]


class Silent:
    """Implements `PredictObserver`, and shows nothing."""

    def say(self, line: str) -> None:
        pass

    def on_delivery(self, node: str, delivery: Any) -> None:
        pass

    @contextmanager
    def preparing(self, what: str = "", expected: Any = ()) -> Iterator[Any]:
        yield lambda label, progress: None


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
    return Prepared(file, model, public, validation, {})


@pytest.fixture
def request_of_all(tmp_path: Path) -> PredictRequest:
    (tmp_path / "trained.keras").touch()
    (tmp_path / "job.yaml").write_text(
        f"model: trained.keras\ndata: {{public: {{path: x}}}}\nrecipe: {{epochs: 1, seed: {SEED}}}\n"
    )
    fleet = Fleet(tuple(Node(node, "10.0.0.1") for node in NODES))
    job = load_job(tmp_path / "job.yaml")
    on = (PUBLIC, VALIDATION)
    return PredictRequest(
        job, tmp_path / "trained.keras", fleet, tmp_path, tmp_path / "a.csv", on, CLASSES, batch_size=8
    )


def predict(
    request: PredictRequest, prepared: Prepared, parts: list[Part]
) -> tuple[list[Block], PredictResult]:
    """Predict `parts` where both nodes fail."""
    root = request.directory
    sessions = {HOST_NAME: Host(root)} | {node: FakeSession(node) for node in NODES}
    space: Any = SimpleNamespace(fleet=request.fleet, facts={}, sessions=sessions)
    prediction = _Prediction(request, prepared, space, (ResultRule("", SOFTMAX),), root, Silent())
    assert prediction.run(parts) == {}
    return prediction.blocks(), prediction.count()


def test_host_predicts_the_public_samples_of_all_nodes_that_fail_beside_its_own(
    request_of_all: PredictRequest, prepared: Prepared
) -> None:
    """Each sample once, in order, and none of them as another one."""
    assert prepared.validation
    shard = DatasetSlice("shard.npy", "labels.npy")
    spans = {HOST_NAME: (0, 20), "csd0": (20, 13), "csd1": (33, 17)}
    own, *others = (
        Part(PUBLIC, HOST_NAME, name, shard, count, Runtime(), start)
        for name, (start, count) in spans.items()
    )
    own = on_host(own, prepared, request_of_all.job, Runtime())
    validation = Part(VALIDATION, HOST_NAME, HOST_NAME, whole(prepared.validation), NUM_VALIDATION, Runtime())
    blocks, result = predict(request_of_all, prepared, [own, *others, validation])
    assert [(block.data, block.node) for block in blocks] == [(PUBLIC, HOST_NAME), (VALIDATION, HOST_NAME)]
    for block, count in zip(blocks, (NUM_PUBLIC, NUM_VALIDATION), strict=True):
        assert block.rows.tolist() == list(range(count))
        assert block.fields["class"].tolist() == list(range(count))
    num_rows = NUM_PUBLIC + NUM_VALIDATION
    assert (result.num_rows, result.num_rows_of) == (num_rows, {HOST_NAME: num_rows})
    assert result.num_computed == num_rows - 4


def test_rows_come_by_machine_then_by_data_set_however_they_were_computed(
    request_of_all: PredictRequest, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepared.validation
    root = request_of_all.directory
    request = replace(request_of_all, on=(PUBLIC, VALIDATION, PRIVATE))
    monkeypatch.setattr("csdctl.workflows.predict.predict.deploy_files", lambda *_: None)
    private = {node: write(root / node, 3) for node in NODES}
    parts = [Part(PRIVATE, node, node, whole(private[node]), 3, Runtime()) for node in reversed(NODES)]
    parts.append(
        Part(VALIDATION, HOST_NAME, HOST_NAME, whole(prepared.validation), NUM_VALIDATION, Runtime())
    )
    own = Part(PUBLIC, HOST_NAME, HOST_NAME, whole(prepared.public), NUM_PUBLIC, Runtime(), 0)
    parts.append(on_host(own, prepared, request.job, Runtime()))
    sessions = {name: Host(root, name) for name in (HOST_NAME, *NODES)}
    space: Any = SimpleNamespace(fleet=request.fleet, facts={}, sessions=sessions)
    prediction = _Prediction(request, prepared, space, (ResultRule("", SOFTMAX),), root, Silent())
    assert prediction.run(parts) == {}
    assert [(block.data, block.node) for block in prediction.blocks()] == [
        (PUBLIC, HOST_NAME),
        (VALIDATION, HOST_NAME),
        (PRIVATE, "csd0"),
        (PRIVATE, "csd1"),
    ]
    assert prediction.count().num_rows_of == {
        HOST_NAME: NUM_PUBLIC + NUM_VALIDATION,
        "csd0": 3,
        "csd1": 3,
    }
