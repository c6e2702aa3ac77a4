"""What a node sends as results is bounded, hashed and counted before anything reads it."""

import base64
import hashlib
import io
import json
from collections.abc import Sequence

import pytest

from csdctl.errors import CsdctlError
from csdctl.shipping.worker_calls import fetch_results
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.features import SendSpec, Sent
from csdctl.worker.protocol.json_codec import (
    ANSWER_PREFIX,
    DATA_PREFIX,
    WORKER_ERROR_PREFIX,
    from_json,
    to_json,
)
from tests.fake_session import FakeSession

CONTENT = bytes(range(256)) * 5
SPEC = SendSpec("ab" * 32, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
END = ANSWER_PREFIX + to_json(Sent(len(CONTENT)))


def data_lines(content: bytes, size: int = 500) -> list[str]:
    starts = range(0, len(content), size)
    return [DATA_PREFIX + base64.b64encode(content[start : start + size]).decode() for start in starts]


def fetch(session: FakeSession) -> bytes:
    target = io.BytesIO()
    fetch_results(session, "python3", "worker.pyz", SPEC, target, TrafficClass.SCORES, doing="predicting")
    return target.getvalue()


def test_results_are_fetched_and_counted() -> None:
    lines = data_lines(CONTENT)
    session = FakeSession("csd0").on("python3", replies=lambda request: [*lines, END])
    assert fetch(session) == CONTENT
    assert from_json(SendSpec, session.conversations[0].sent[0]) == SPEC
    counted = session.meter.by_class()[TrafficClass.SCORES]
    assert (counted.sent, counted.received) == (0, sum(len(line) + 1 for line in lines))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*data_lines(CONTENT + b"x"), END], "received more than 1,280 bytes"),
        ([*data_lines(CONTENT[:-1]), END], "received a file with SHA-256"),
        ([*data_lines(CONTENT[::-1]), END], "received a file with SHA-256"),
        ([DATA_PREFIX + "!!!", END], "not base64"),
        (["noise", END], "received a file with SHA-256"),
    ],
)
def test_other_results_than_described_are_refused(lines: Sequence[str], message: str) -> None:
    session = FakeSession("csd0").on("python3", replies=lambda request: lines)
    with pytest.raises(CsdctlError, match=message) as refused:
        fetch(session)
    assert refused.value.node == "csd0"


def test_error_of_the_worker_is_that_of_the_node() -> None:
    described = {"message": "the results have changed", "remedy": "run again", "exit_code": 1}
    session = FakeSession("csd0").on(
        "python3", exit_code=1, stderr=WORKER_ERROR_PREFIX + json.dumps(described) + "\n"
    )
    with pytest.raises(CsdctlError, match="the results have changed") as refused:
        fetch(session)
    assert (refused.value.node, refused.value.remedy) == ("csd0", "run again")
