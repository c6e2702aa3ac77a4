"""What another machine sends in place of a message: refused in one sentence, whatever it is."""

import dataclasses
import json
import math
import typing
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csdctl.worker.protocol import datasets, events, json_codec, orders, probe
from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.run_spec import RunSpec

MESSAGES: list[Any] = [
    *events.EVENTS.values(),
    *orders.ORDERS.values(),
    *(
        datasets.DatasetInfo,
        datasets.PrepareProgress,
        datasets.PrepareSpec,
        ModelInfo,
        RunSpec,
    ),
    *(probe.ProbeSpec, probe.ProbeRequest, probe.AttachRequest, probe.ProbeResult),
]
NODES = ("host", "csd0", "csd1")
RESULT = probe.ProbeResult(32, 0.25, 4, 1 << 30)
INFO = datasets.DatasetInfo("/data", 10, (28, 28, 1), "uint8", (), 9, "abc", {"empty": 1}, {"cat": 5})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@dataclasses.dataclass(frozen=True)
class Sample:
    count: int = 0
    share: float = 0.0
    flag: bool = False
    name: str = ""
    loss: Annotated[float, json_codec.AnyNumber] = 0.0
    maybe: int | None = None
    either: float | bool = 0.0
    pair: tuple[int, int] = (0, 0)
    many: tuple[int, ...] = ()
    named: dict[str, int] = dataclasses.field(default_factory=dict)
    small: Annotated[int, json_codec.Between(1, 9)] = 1
    side: Annotated[str, json_codec.OneOf(("left", "right"))] = "left"
    short: Annotated[str, json_codec.MaxLength(3)] = ""


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_field_has_an_annotation_that_is_checked(message: Any) -> None:
    fields = typing.get_type_hints(message)
    for field in fields:
        with pytest.raises(ProtocolError):
            json_codec.from_dict(message, {**dict.fromkeys(fields, None), field: object()})


@pytest.mark.parametrize(
    "valid",
    [
        {"count": -(1 << 63)},
        {"count": (1 << 64) - 1},
        {"share": 1},
        {"loss": math.nan},
        {"loss": -math.inf},
        {"maybe": None},
        {"maybe": 5},
        {"either": True},
        {"either": 0.5},
        {"small": 9},
        {"side": "right"},
        {"short": "abc"},
    ],
    ids=str,
)
def test_value_within_its_bounds_is_read(valid: dict[str, Any]) -> None:
    ((field, value),) = valid.items()
    found = getattr(json_codec.from_dict(Sample, valid), field)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("count", True, "an integer"),
        ("count", 1.0, "an integer"),
        ("count", "1", "an integer"),
        ("count", 1 << 64, "an integer of at most 64 bits"),
        ("count", -(1 << 63) - 1, "an integer of at most 64 bits"),
        ("count", None, "an integer"),
        ("share", math.nan, "a finite number"),
        ("share", math.inf, "a finite number"),
        ("share", False, "a finite number"),
        ("share", 10**400, "a finite number"),
        ("flag", 1, "true or false"),
        ("name", 5, "text"),
        ("name", "x" * (json_codec.MAX_STRING_CHARS + 1), "text of at most 65,536 characters"),
        ("loss", "nan", "a number"),
        ("loss", True, "a number"),
        ("maybe", "5", "an integer"),
        ("either", "yes", "true or false"),
        ("pair", [1], "2 items"),
        ("pair", [1, 2, 3], "2 items"),
        ("pair", {"0": 1, "1": 2}, "a list"),
        ("many", "12", "a list"),
        ("many", [1, "2"], "an integer"),
        ("many", [0] * (json_codec.MAX_ITEMS + 1), "a list of at most 262,144 items"),
        ("named", [["a", 1]], "an object"),
        ("named", {"a": "1"}, "an integer"),
        ("small", 0, "1 to 9"),
        ("small", 10, "1 to 9"),
        ("side", "up", "one of 'left', 'right'"),
        ("short", "abcd", "a length of at most 3"),
    ],
)
def test_value_of_another_type_or_out_of_range_is_refused(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        json_codec.from_dict(Sample, {field: value})
    message = str(caught.value)
    assert message.startswith(f"Sample.{field}: expected {expected}")
    assert "received" in message
    assert len(message) < 500


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * (json_codec.MAX_DEPTH + 1) + "]" * (json_codec.MAX_DEPTH + 1),
        '["\\"", ' * (json_codec.MAX_DEPTH + 1),
        "9" * 5000,
        " " * (json_codec.MAX_JSON_CHARS + 1),
        '"' + '\\"' * 300_000 + "[" * 100,
        '"\\',
        "\x1b]52;c;aGk=\x07",
    ],
    ids=lambda text: text[:20],
)
def test_text_that_is_too_much_for_a_parser_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        json_codec.parse_json(text)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_brackets_in_strings_and_beside_each_other_are_not_depth() -> None:
    assert json_codec.parse_json(json.dumps(["[" * 1000, '"[{' * 1000])) == ["[" * 1000, '"[{' * 1000]
    assert len(json_codec.parse_json("[" + ",".join(["[[]]"] * 1000) + "]")) == 1000
    nested = "[" * json_codec.MAX_DEPTH + "]" * json_codec.MAX_DEPTH
    assert json_codec.parse_json(nested)


@given(JSON_VALUES, st.sampled_from(sorted(events.EVENTS)))
@settings(max_examples=300, deadline=None)
def test_any_json_is_an_event_or_refused(value: Any, name: str) -> None:
    fields = dict.fromkeys(typing.get_type_hints(events.EVENTS[name]), value)
    for content in (value, {"event": name, **fields}, {"event": value}):
        try:
            event = events.event_from_line(events.EVENT_PREFIX + json.dumps(content))
        except ProtocolError:
            continue
        assert isinstance(event, events.Event)
        assert isinstance(events.event_from_line(events.event_to_line(event)), type(event))


@given(st.text(max_size=100))
@settings(deadline=None)
def test_any_text_is_an_order_or_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        orders.order_from_line(text)


def test_long_message_of_a_failure_is_cut() -> None:
    event = events.event_from_line(events.event_to_line(events.Failed(1, "csd0", "x" * 10_000, "y" * 4000)))
    assert event == events.Failed(1, "csd0", "x" * (events.MAX_MESSAGE_CHARS - 1) + "…", "y" * 4000)


def test_lone_surrogate_in_an_event_becomes_a_question_mark() -> None:
    line = (
        events.EVENT_PREFIX + '{"event":"Failed","rank":1,"node":"csd0","message":"\\ud800 \\ud83d\\ude00"}'
    )
    assert events.event_from_line(line) == events.Failed(1, "csd0", "? 😀")


@pytest.mark.parametrize("step_time_s", [0, -0.1, math.nan, math.inf, 1e300, "0.1"])
def test_impossible_time_of_a_probe_is_refused(step_time_s: Any) -> None:
    content = {**dataclasses.asdict(RESULT), "step_time_s": step_time_s}
    with pytest.raises(ProtocolError, match="ProbeResult.step_time_s"):
        json_codec.from_json(probe.ProbeResult, json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        {"num_samples": -1},
        {"num_samples": 10**18},
        {"sample_shape": [-1]},
        {"sample_shape": [1] * 33},
        {"sample_shape": "28"},
        {"max_label": -2},
        {"num_skipped": {"empty": -1}},
        {"class_counts": {"cat": 0.5}},
        {"fingerprint": "x" * 300},
        {"unusable_classes": "cat"},
    ],
    ids=str,
)
def test_impossible_data_set_is_refused(change: dict[str, Any]) -> None:
    assert json_codec.from_json(datasets.DatasetInfo, json_codec.to_json(INFO)) == INFO
    with pytest.raises(ProtocolError, match=f"DatasetInfo.{next(iter(change))}"):
        json_codec.from_json(datasets.DatasetInfo, json.dumps({**dataclasses.asdict(INFO), **change}))


@pytest.mark.parametrize(
    "order",
    [
        '{"order":"FormGroup","generation":1,"ranks":[0,-1]}',
        '{"order":"FormGroup","generation":1,"ranks":"01"}',
        '{"order":"FormGroup","generation":1,"ranks":[0],"collective":"gossip"}',
        '{"order":"Ping","number":"1"}',
        "[" * 100_000,
    ],
)
def test_rank_refuses_an_invalid_order(order: str) -> None:
    assert isinstance(
        orders.order_from_line('{"order":"FormGroup","generation":1,"ranks":[0]}'), orders.FormGroup
    )
    with pytest.raises(ProtocolError):
        orders.order_from_line(order)


def test_event_must_be_of_a_rank_of_the_run_and_its_node() -> None:
    ready = events.Ready(1, "csd0", 1, 0.1)
    events.check_event(ready, NODES)
    events.check_sender(ready, 1, NODES)
    for wrong in (dataclasses.replace(ready, rank=3), dataclasses.replace(ready, node="csd1")):
        with pytest.raises(ProtocolError, match="received rank"):
            events.check_event(wrong, NODES)
        with pytest.raises(ProtocolError, match="expected rank 1 on csd0"):
            events.check_sender(wrong, 1, NODES)


def test_verification_has_a_result_for_every_rank() -> None:
    compared = events.Compared(0.0, 1e-7, 0.1)
    sums, told = ("float32", 0.0, 1e-7, "float32"), (0.0, None, (), "", "star")
    verified = events.Verified(0, "host", 24, (8, 8, 8), *sums, (compared,) * 3, *told)
    events.check_event(verified, NODES)
    fewer = {"batch_sizes": (8, 8), "of_ranks": (compared,) * 2}
    for wrong in ({name: value} for name, value in fewer.items()):
        with pytest.raises(ProtocolError, match="expected results of 3 ranks"):
            events.check_event(dataclasses.replace(verified, **wrong), NODES)


def test_rank_that_fails_before_it_knows_its_node_is_of_the_run() -> None:
    events.check_event(events.Failed(1, events.UNKNOWN_NODE, "no spec"), NODES)
    with pytest.raises(ProtocolError):
        events.check_event(events.Ready(1, events.UNKNOWN_NODE, 1, 0.1), NODES)


@pytest.mark.parametrize("field", ["global_samples", "loss", "accuracy", "metrics"])
def test_only_rank_0_reports_for_all_ranks(field: str) -> None:
    values: dict[str, Any] = {"global_samples": 1, "loss": 0.0, "accuracy": math.nan, "metrics": {"a": 1.0}}
    own = events.Progress(1, "csd0", 1, 1, 1, 8, 0.1, 0.1, 0.2)
    events.check_event(own, NODES)
    changed = dataclasses.replace(own, **{field: values[field]})
    events.check_event(dataclasses.replace(changed, rank=0, node="host"), NODES)
    with pytest.raises(ProtocolError, match=f"Progress.{field}: expected from rank 0 alone"):
        events.check_event(changed, NODES)
