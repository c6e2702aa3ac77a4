"""Calls of the worker: what runs on the machine, and what it sends as results."""

import base64
import hashlib
import io
import re
import sys
import zipfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError
from csdctl.shipping.store import pack_worker, store_bytes
from csdctl.shipping.worker_calls import call_worker, fetch_results
from csdctl.transport.commands import build_worker_command
from csdctl.transport.local import LocalSession
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.datasets import DatasetInfo, LookSpec, PrepareSpec
from csdctl.worker.protocol.features import SendSpec
from csdctl.worker.protocol.json_codec import from_json, to_frame
from tests.fake_session import FakeSession

CONTENT = bytes(range(256)) * 5
SPEC = SendSpec("ab" * 32, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
END = to_frame("result", {})


@pytest.mark.attack(7)
def test_worker_runs_from_the_zip_that_was_checked_and_from_no_other(tmp_path: Path) -> None:
    worker = store_bytes(pack_worker(), ".pyz", tmp_path)
    (tmp_path / "hashlib.py").write_text("raise SystemExit('a module of the working directory was imported')")
    command = build_worker_command(sys.executable, worker.path, ["--help"])
    with closing(LocalSession("csd2", tmp_path)) as session:
        done = session.run(command)
        assert "usage: csdctl.worker" in done.output, done.stderr
        with zipfile.ZipFile(worker.source, "w") as changed:
            changed.writestr("__main__.py", "print('the neighbour was here')")
        done = session.run(command)
    assert (done.exit_code, done.output) == (1, "")
    assert done.last_error_line.endswith("has been changed since csdctl sent it: deploy again")


NOISE = "I0000 00:00:1 port.cc] oneDNN custom operations are on\n"
"""TensorFlow always prints it."""


@pytest.mark.parametrize(
    ("function", "exit_code", "stderr", "message", "remedy"),
    [
        ("1.py:load", 3, "", "most likely your function load, or a library of it, ended", "load by itself"),
        ("1.py:load", 139, "", "most likely your function load", "fix what crashes or calls os._exit"),
        ("1.py:load", 137, "", r"killed, most likely out of memory \(no message\)$", "check the load"),
        ("", 139, "", "exit code 139: no message$", "check the load"),
        ("", 1, f"ImportError: libmpi.so\n{NOISE}", "exit code 1: ImportError: libmpi.so$", "reinstall"),
    ],
)
def test_end_of_the_worker_is_explained_by_its_message_or_by_a_function_that_it_has_called(
    function: str, exit_code: int, stderr: str, message: str, remedy: str
) -> None:
    session = FakeSession("csd2").on("python3", exit_code=exit_code, stderr=stderr)
    prepare = PrepareSpec("d", "s", function=function and f"code/{function}")
    for command, request in (("prepare", prepare), ("look", LookSpec(prepare))):
        with pytest.raises(CsdctlError) as raised:
            call_worker(session, "python3", "w.pyz", command, request, DatasetInfo, doing="preparing data")
        assert re.search(message, raised.value.message)
        assert remedy in raised.value.remedy


def data_lines(content: bytes, size: int = 500) -> list[str]:
    starts = range(0, len(content), size)
    return [f"@csdctl-data {base64.b64encode(content[start : start + size]).decode()}" for start in starts]


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
    assert counted == (0, sum(len(line) + 1 for line in lines))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*data_lines(CONTENT + b"x"), END], "received more than 1,280 bytes"),
        ([*data_lines(CONTENT[::-1]), END], "received a file with SHA-256"),
        (["@csdctl-data !!!", END], "not base64"),
        (["noise", END], "received a file with SHA-256"),
        (["@csdctl-data "] * 9999, "expected one each second"),
    ],
)
def test_other_results_than_described_are_refused(lines: Sequence[str], message: str) -> None:
    session = FakeSession("csd0").on("python3", replies=lambda request: lines)
    with pytest.raises(CsdctlError, match=message) as refused:
        fetch(session)
    assert refused.value.node == "csd0"
