"""Messages between csdctl and its worker: read as they were written, and anything else is refused.

The users of sandboxes, and the versions of packages.
"""

import dataclasses
import json
import math
import typing
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.standalone import leftovers
from csdctl.worker.protocol import datasets, events, json_codec, model_info, orders
from csdctl.worker.protocol.json_codec import SCHEMA, ProtocolError, from_json, to_json
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.packages import find_version
from csdctl.worker.protocol.recipe import EarlyStopping, Noise, Recipe, ReduceOnPlateau
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec, RunSpec, Runtime
from csdctl.worker.protocol.sandbox import FIRST_USER, NUM_RUNS, user_of_link

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
INFO = datasets.DatasetInfo("/data", 10, (28, 28, 1), "uint8", (), 9, "abc", {"empty": 1}, {"cat": 5})
RESULT = events.Probed(1, "csd0", 32, 0.25, 4, 1 << 30)
VALUES = [
    INFO,
    ModelInfo("keras.applications:MobileNetV2", {"": (0, 0, 3)}, 100, 90),
    RUN,
    dataclasses.replace(RUN, validation=None, noise=Noise(1.0, 8.0, 1e-5), recipe=Recipe(input_range=None)),
    RESULT,
]
PROGRESS = events.Progress(0, "host", 1, 2, 3, 96, 0.5, 0.25, 0.8, 128, 2.5, 0.1)
VERIFIED = events.Verified(
    *(0, "host", (16, 4), "bfloat16", 6e-8, 1.2e-7, "float32", (0.0, 1e-7), 3e-7, 0.2, "hash")
)
EVENT_EXAMPLES = [
    events.SumTimed(0, "host", (0, 1, 2), 1 << 20, 0.0035),
    events.SaveTimed(0, "host", 0.25),
    events.Ready(1, "csd0", 100),
    events.Probed(1, "csd0", 8, 0.25, 4, 1 << 30),
    PROGRESS,
    events.Traffic(
        0, "host", (events.SentBytes("sums", 0, 1, 1 << 33), events.SentBytes("samples", 0, 2, 7))
    ),
    VERIFIED,
    events.Evaluating(0, "host", 256, 10_000),
    events.EpochEnd(1, "csd0", 1, 4, 16, 0.5, 0.25, 0.8, "hash"),
    events.CheckpointSaved(0, "host", 1, 40, "step-00000040.npz", True),
    events.Warned(0, "host", "step-00000040.npz is damaged", "look at the disk"),
    events.Joined(0, "host", 1, 7, 40, 47, {"0": 32, "1": 4}, False, ((2, "no answer"),), 500, 96),
    events.Misbehaved(0, "host", 1, "sent 20 bytes, expected 100"),
    events.Pong(1, "csd0", 3),
    events.WaitingFor(0, "host", ("csd0", "csd1")),
    events.Rebalanced(0, "host", 1, 9, "csd0", 1.8, {"0": 34, "1": 2}),
    events.NodeLost(1, "csd0", "killed", "see its log"),
    events.NodeBack(1, "csd0"),
    events.Finished(0, "host", 1, 4, "hash", 1 << 30, "model.keras"),
    events.Failed(1, "csd0", "a tab\t, a line\nend, “quotes” and ü", "see the log", 2),
]
ORDER_EXAMPLES = [
    orders.OpenHub("key"),
    orders.Begin((0, 2)),
    orders.Stop(),
    orders.Probe({"1": orders.ProbeRequest(32)}),
    orders.TakeSteps((orders.TrialShard(32, 64, 16, 10, 22), orders.TrialShard(4, 8, None, 0, 4)), True),
    orders.Ping(4),
]


NODES = ("host", "csd0", "csd1")
MESSAGES: list[Any] = [
    *events.EVENTS.values(),
    *orders.ORDERS.values(),
    *(datasets.DatasetInfo, datasets.PrepareProgress, datasets.PrepareSpec),
    *(ModelInfo, RunSpec, orders.ProbeRequest, model_info.PartsSpec, model_info.PartTimes),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_written_value_is_read_back_unchanged(value: object) -> None:
    text = to_json(value)
    assert "\n" not in text
    read = from_json(type(value), text)
    assert repr(read) == repr(value), "tuples are tuples again, not lists"


def test_orders_and_events_are_lines_and_are_read_back_unchanged() -> None:
    assert {type(event).__name__ for event in EVENT_EXAMPLES} == set(events.EVENTS)
    for event in EVENT_EXAMPLES:
        line = events.event_to_line(event)
        assert "\n" not in line
        assert events.event_from_line(line) == event
    assert {type(order).__name__ for order in ORDER_EXAMPLES} == set(orders.ORDERS)
    for order in ORDER_EXAMPLES:
        line = orders.order_to_line(order)
        assert "\n" not in line
        assert orders.order_from_line(line) == order


@given(st.text(max_size=200), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_any_message_and_any_loss_are_preserved(message: str, loss: float) -> None:
    failed = events.Failed(3, "csd2", message)
    line = events.event_to_line(failed)
    assert line.isascii()
    assert events.event_from_line(line) == failed
    read = events.event_from_line(events.event_to_line(dataclasses.replace(PROGRESS, loss=loss)))
    assert isinstance(read, events.Progress)
    assert repr(read.loss) == repr(loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": SCHEMA + 1}, f"RunSpec: received schema {SCHEMA + 1}, expected {SCHEMA}"),
        ({"colour": 1, "age": 2}, "RunSpec: unknown 'age, colour'"),
        ({"output_directory": None}, r"RunSpec.output_directory"),
    ],
)
def test_other_fields_than_this_version_knows_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        from_json(RunSpec, json.dumps({**json.loads(to_json(RUN)), **change}))


def test_fields_with_a_default_may_be_missing_and_no_others() -> None:
    with pytest.raises(ProtocolError, match="ModelInfo: expected .*inputs.*, received none"):
        from_json(ModelInfo, "{}")
    described = json.loads(to_json(ModelInfo("m", {"": (4,)}, 7, 5, num_operations=9)))
    del described["num_operations"]
    assert from_json(ModelInfo, json.dumps(described)).num_operations == 0


@pytest.mark.parametrize("line", ["", "hello", "csdctl {}", " " + events.event_to_line(PROGRESS), "@csdctl"])
def test_line_without_an_event_is_distinguished_from_a_damaged_one(line: str) -> None:
    assert events.event_from_line(line) is None


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


VALID: list[tuple[str, Any]] = [
    *(("count", -(1 << 63)), ("count", (1 << 64) - 1), ("share", 1), ("loss", math.nan), ("loss", -math.inf)),
    *(("maybe", None), ("either", True), ("either", 0.5), ("small", 9), ("side", "right"), ("short", "abc")),
]


@pytest.mark.parametrize(("field", "value"), VALID, ids=str)
def test_value_within_its_bounds_is_read(field: str, value: Any) -> None:
    assert repr(getattr(json_codec.from_dict(Sample, {field: value}), field)) == repr(value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("count", True, "an integer"),
        ("count", 1.0, "an integer"),
        ("count", 1 << 64, "an integer of at most 64 bits"),
        ("share", math.nan, "a finite number"),
        ("share", 10**400, "a finite number"),
        ("flag", 1, "true or false"),
        ("name", 5, "text"),
        ("name", "x" * (json_codec.MAX_STRING_CHARS + 1), "text of at most 65,536 characters"),
        ("loss", "nan", "a number"),
        ("either", "yes", "true or false"),
        ("pair", [1], "2 items"),
        ("many", [1, "2"], "an integer"),
        ("many", [0] * (json_codec.MAX_ITEMS + 1), "a list of at most 262,144 items"),
        ("named", [["a", 1]], "an object"),
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


def test_text_of_a_failure_is_cut_and_can_be_shown() -> None:
    event = events.event_from_line(events.event_to_line(events.Failed(1, "csd0", "x" * 10_000, "y" * 4000)))
    assert event == events.Failed(1, "csd0", "x" * (events.MAX_MESSAGE_CHARS - 1) + "…", "y" * 4000)
    line = '{"event":"Failed","rank":1,"node":"csd0","message":"\\ud800 \\ud83d\\ude00"}'
    assert events.event_from_line(events.EVENT_PREFIX + line) == events.Failed(1, "csd0", "? 😀")


@pytest.mark.parametrize(
    ("valid", "change"),
    [
        *((RESULT, {"step_time_s": time_s}) for time_s in (0, -0.1, math.nan, math.inf, 1e300, "0.1")),
        *((INFO, {"num_samples": number}) for number in (-1, 10**18)),
        *((INFO, {"sample_shape": shape}) for shape in ("28", [-1], [1] * 33)),
        *((INFO, change) for change in ({"max_label": -2}, {"fingerprint": "x" * 300})),
    ],
    ids=str,
)
def test_impossible_measurement_and_data_set_are_refused(valid: Any, change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=f"{type(valid).__name__}.{next(iter(change))}"):
        from_json(type(valid), json.dumps({**dataclasses.asdict(valid), **change}))


@pytest.mark.parametrize(
    "line",
    [
        '{"order":"Begin","ranks":[0,-1]}',
        '{"order":"OpenHub"}',
        '{"request":"Stop"}',
        '{"request":["ProbeRequest"]}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:40],
)
def test_rank_refuses_an_invalid_order(line: str) -> None:
    with pytest.raises(ProtocolError):
        orders.order_from_line(line)


def test_event_must_be_of_a_rank_of_the_run_and_its_node() -> None:
    ready = events.Ready(1, "csd0", 1)
    events.check_event(ready, NODES)
    events.check_event(ready, NODES, 1)
    events.check_event(events.Failed(1, events.UNKNOWN_NODE, "no spec"), NODES)  # before it knows its node
    unknown = dataclasses.replace(ready, node=events.UNKNOWN_NODE)
    for wrong in (unknown, dataclasses.replace(ready, rank=3), dataclasses.replace(ready, node="csd1")):
        with pytest.raises(ProtocolError, match="received rank"):
            events.check_event(wrong, NODES)
        with pytest.raises(ProtocolError, match="expected rank 1 on csd0"):
            events.check_event(wrong, NODES, 1)


def test_verification_has_a_result_for_every_rank() -> None:
    sums = ("float32", 0.0, 1e-7, "float32")
    verified = events.Verified(0, "host", (8, 8, 8), *sums, (0.0,) * 3, 1e-7, 0.1, "")
    events.check_event(verified, NODES)
    for wrong in ({"batch_sizes": (8, 8)}, {"differences": (0.0,) * 2}):
        with pytest.raises(ProtocolError, match="expected results of 3 ranks"):
            events.check_event(dataclasses.replace(verified, **wrong), NODES)


@pytest.mark.parametrize(
    ("field", "value"),
    {"global_samples": 1, "loss": 0.0, "accuracy": math.nan, "metrics": {"a": 1.0}}.items(),
)
def test_only_rank_0_reports_for_all_ranks(field: str, value: Any) -> None:
    own = events.Progress(1, "csd0", 1, 1, 1, 8, 0.1, 0.1, 0.2)
    events.check_event(own, NODES)
    changed = dataclasses.replace(own, **{field: value})
    events.check_event(dataclasses.replace(changed, rank=0, node="host"), NODES)
    with pytest.raises(ProtocolError, match=f"Progress.{field}: expected only from rank 0"):
        events.check_event(changed, NODES)


def test_every_link_of_two_runs_has_a_user_of_its_own_that_no_account_has() -> None:
    ranks = (0, 1, json_codec.MAX_RANKS - 1)
    users = [user_of_link(run_id, rank) for run_id in ("20261129-005452-257293", "run") for rank in ranks]
    assert len(set(users)) == len(users)
    assert all(FIRST_USER <= user < 1 << 31 for user in users)


def test_leftovers_of_every_link_are_found_as_those_of_a_sandbox() -> None:
    last = FIRST_USER + NUM_RUNS * json_codec.MAX_RANKS - 1
    assert range(FIRST_USER, last + 1) == leftovers.SANDBOX_USERS
    assert user_of_link("20261129-005452-257293", json_codec.MAX_RANKS - 1) in leftovers.SANDBOX_USERS


def test_version_is_that_of_the_first_package_that_is_installed() -> None:
    assert find_version("no-such-package", "numpy", "pip") == np.__version__
    assert find_version("no-such-package") == ""
