"""What a node says about its prepared data: types and ranges."""

import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from csdctl.errors import RemoteCommandError
from csdctl.transport.program import Patience, Program
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import RESULT, to_frame
from csdctl.workflows.data.prepare import check_info
from tests.fake_session import FakeSession

FIELDS = json.dumps([["left", "float32", [28, 28]], ["right", "uint8", []]])
INFO = DatasetInfo(
    "data/x",
    10,
    (28, 28, 1),
    "uint8",
    (),
    9,
    "0123456789abcdef",
    {"undecodable": 2},
    {"ant": 10},
    label_dtype="int32",
    max_labels={"": 9},
    max_values={"left": 70_000},
    padded={"left": (7, 3)},
)


def check(info: DatasetInfo) -> None:
    answer = [to_frame(RESULT, info)]
    session = FakeSession("csd0").on("python", replies=lambda request: answer)
    with closing(Program(session, ["python"], "preparing data", Patience())) as program:
        check_info(program.call({}, DatasetInfo), "csd0", "preparing data")


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool", ">f4", FIELDS])
def test_descriptions_of_prepared_data_are_accepted(dtype: str) -> None:
    check(replace(INFO, dtype=dtype))
    check(replace(INFO, label_dtype=dtype))


@pytest.mark.attack(13)
@pytest.mark.parametrize(
    "change",
    [
        {"path": ""},
        {"fingerprint": "../../etc"},
        {"num_samples": 0},
        {"num_samples": 1 << 60},
        {"sample_shape": (-1,)},
        {"sample_shape": (1,) * 100},
        {"label_shape": (1.5,)},
        {"dtype": "[" * 5000},
        {"dtype": '[["a", "float32", [-1]]]'},
        {"dtype": '[["a", "float32"]]'},
        {"dtype": "O; import os"},
        {"label_dtype": ""},
        {"max_labels": {"": -2}},
        {"max_values": {str(n): 1 for n in range(2000)}},
        {"max_values": {"a": 1 << 64}},
        {"padded": {"a": (-1,)}},
        {"max_label": -2},
        {"num_skipped": {"too large": -1}},
        {"class_counts": {"ant": "ten"}},
    ],
    ids=lambda change: str(change)[:40],
)
def test_other_types_and_ranges_are_an_error_of_the_node(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteCommandError) as raised:
        check(replace(INFO, **change))
    assert raised.value.node == "csd0"
