import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.worker.protocol import events, orders, probe
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import SCHEMA, ProtocolError, from_json, to_json, to_tagged
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.recipe import EarlyStopping, Noise, Recipe, ReduceOnPlateau
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec, RunSpec, Runtime

RECIPE = Recipe(
    optimizer_args={"momentum": 0.9, "nesterov": True},
    input_range=(-1.0, 1.0),
    seed=7,
    max_learning_rate=0.5,
    decay="cosine",
    metrics=("accuracy", "mae"),
    early_stopping=EarlyStopping("loss", 2, 0.1),
    reduce_on_plateau=ReduceOnPlateau(factor=0.5),
)
PART = DatasetSlice("a/images.npy", "a/labels.npy", 3, 9, 7)
RUN = RunSpec(
    run_id="20260101-120000-ab12",
    architecture=".csdctl/objects/a.json",
    weights=".csdctl/objects/w.npz",
    recipe=RECIPE,
    ranks=(
        RankSpec(0, "host", 32, Runtime(8), PART, DatasetSlice("b/i.npy", "b/l.npy"), 40, 60, 7, 64, 16),
        RankSpec(1, "csd0", 4, Runtime(4), None, None, 0, 0),
    ),
    public=PART,
    validation=PART,
    output_directory=".csdctl/runs/x",
)
VALUES = [
    DatasetInfo("/data", 10, (28, 28, 1), "uint8", (), 9, "abc"),
    ModelInfo("keras.applications:MobileNetV2", (0, 0, 3), (10,), 100, 90, "softmax"),
    PART,
    RUN,
    dataclasses.replace(RUN, validation=None, max_steps=3, recipe=Recipe(input_range=None)),
    dataclasses.replace(RUN, noise=Noise(1.0, 8.0, 1e-5)),
    RECIPE,
    probe.ProbeSpec(
        "a", "w", RECIPE, Runtime(4, 2, False), DatasetInfo("d", 7, (28, 28, 1), "uint8", (), 9, "f")
    ),
    probe.ProbeRequest(32, min_duration_s=0.5),
    probe.ProbeResult(32, 0.25, 4, 1 << 30),
]
PROGRESS = events.Progress(0, "host", 1, 2, 3, 96, 0.5, 0.25, 0.8, 128, 2.5, 0.1)
VERIFIED = events.Verified(
    *(0, "host", 20, (16, 4), "bfloat16", 6e-8, 1.2e-7, "float32"),
    (events.Compared(0.0, 3e-7, 0.2), events.Compared(1e-7, 4e-7, 0.5)),
    *(3.5e-7, events.Compared(1e-7, 4e-7, 0.02), ("random numbers in dropout",), "hash", "star"),
)
EVENT_EXAMPLES = [
    events.Started(1, "csd0", "node-7"),
    events.MpiChecked(1, "csd0", "Open MPI v5.0.11", 1 << 20, 0.0035),
    events.CollectiveTimed(0, "host", 5, 1 << 20, "star", 0.0035),
    events.Ready(1, "csd0", 100, 3.25),
    PROGRESS,
    events.Traffic(
        0, "host", 2, (events.SentBytes("sums", 0, 1, 1 << 33), events.SentBytes("samples", 0, 2, 7))
    ),
    VERIFIED,
    events.Evaluating(0, "host", 256, 10_000),
    events.EpochEnd(1, "csd0", 1, 4, 16, 0.5, 0.25, 0.8, "hash"),
    events.CheckpointSaved(0, "host", 1, 40, "step-00000040.npz", True),
    events.Joined(0, "host", 2, 1, 7, 40, 47, {"0": 32, "1": 4}, "star", 0.01, 500),
    events.LinkLost(1, "csd0", 2, 1, 7),
    events.Misbehaved(0, "host", 1, "sent 20 bytes, expected 100"),
    events.Paused(1, "csd0", 2),
    events.Pong(1, "csd0", 3),
    events.WaitingFor(0, "host", ("csd0", "csd1")),
    events.Rebalanced(0, "host", 1, 9, "csd0", 1.8, {"0": 34, "1": 2}),
    events.NodeLost(1, "csd0", "killed"),
    events.NodeBack(1, "csd0"),
    events.Finished(0, "host", 1, 4, "hash", 1 << 30, "model.keras"),
    events.Failed(1, "csd0", "a tab\t, a line\nend, “quotes” and ü", "see the log", 2),
    events.Exited(1, "csd0", 137),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_written_value_is_read_back_unchanged(value: object) -> None:
    text = to_json(value)
    assert "\n" not in text
    read = from_json(type(value), text)
    assert read == value
    assert hash(repr(read)) == hash(repr(value))  # tuples are tuples again, not lists


@pytest.mark.parametrize(
    "order",
    [orders.FormGroup(2, (0, 2), "star"), orders.PauseAtEpochEnd(), orders.Stop(), orders.Ping(4)],
    ids=repr,
)
def test_order_is_one_line_and_is_read_back_unchanged(order: orders.Order) -> None:
    line = orders.order_to_line(order)
    assert "\n" not in line
    assert orders.order_from_line(line) == order


@pytest.mark.parametrize("event", EVENT_EXAMPLES, ids=lambda event: type(event).__name__)
def test_event_is_one_line_and_is_read_back_unchanged(event: events.Event) -> None:
    line = events.event_to_line(event)
    assert "\n" not in line
    assert events.event_from_line(line) == event


def test_every_event_is_covered_here() -> None:
    assert {type(event).__name__ for event in EVENT_EXAMPLES} == set(events.EVENTS)


@given(st.text(max_size=200), st.text(max_size=50))
def test_any_message_of_a_failure_is_preserved(message: str, remedy: str) -> None:
    event = events.Failed(3, "csd2", message, remedy)
    line = events.event_to_line(event)
    assert line.isascii()
    assert events.event_from_line(line) == event


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_loss_are_preserved(loss: float) -> None:
    read = events.event_from_line(events.event_to_line(dataclasses.replace(PROGRESS, loss=loss)))
    assert isinstance(read, events.Progress)
    assert repr(read.loss) == repr(loss)


def test_other_schema_is_refused_naming_both() -> None:
    text = to_json(dataclasses.replace(RUN, schema=SCHEMA + 1))
    with pytest.raises(ProtocolError, match=f"RunSpec: received schema {SCHEMA + 1}, expected {SCHEMA}"):
        from_json(RunSpec, text)


def test_unknown_fields_are_named() -> None:
    content = {**json.loads(to_json(RUN)), "colour": 1, "age": 2}
    with pytest.raises(ProtocolError, match="RunSpec: unknown 'age, colour'"):
        from_json(RunSpec, json.dumps(content))


def test_missing_field_is_named() -> None:
    content = json.loads(to_json(RUN))
    del content["output_directory"]
    with pytest.raises(ProtocolError, match=r"RunSpec: .*output_directory"):
        from_json(RunSpec, json.dumps(content))


@pytest.mark.parametrize("line", ["", "hello", "csdctl {}", " " + events.event_to_line(PROGRESS), "@csdctl"])
def test_line_without_an_event_is_distinguished_from_a_damaged_one(line: str) -> None:
    assert events.event_from_line(line) is None


def test_model_described_by_an_older_csdctl_is_read() -> None:
    described = json.loads(to_json(ModelInfo("m", (4,), (3,), 7, 5, "softmax", num_operations=9)))
    del described["num_operations"]
    assert from_json(ModelInfo, json.dumps(described)).num_operations == 0


@pytest.mark.parametrize("request_", [probe.ProbeRequest(32), probe.AttachRequest('a"spec":.json', 1)])
def test_requests_of_a_probe_session_are_read_as_they_were_written(request_: probe.Request) -> None:
    assert probe.request_from_line(json.dumps(to_tagged("request", request_))) == request_


@pytest.mark.parametrize(
    "line", ['{"batch_size":8}', '{"request":"Stop"}', '{"request":["ProbeRequest"]}', "[]"]
)
def test_request_without_a_known_type_is_refused(line: str) -> None:
    with pytest.raises(ProtocolError, match="expected a request"):
        probe.request_from_line(line)
