"""A test that waits for ever in this process fails soon (tests/hangs.py), and the next one runs."""

import os
import sys
from pathlib import Path

import pytest

from tests import patience

ROOT = Path(__file__).parents[2]
SETTINGS = """\
from pathlib import Path

from tests import hangs

hangs.IN_PROCESS = (Path(__file__).parent,)
hangs.FIRST_S, hangs.NEXT_S = 0.1, 0.05
"""
TESTS = """\
import queue
import threading

import pytest


@pytest.fixture
def never_set():
    yield
    threading.Event().wait()


def wait_in_a_thread():
    threading.Event().wait()


def test_that_waits():
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
    queue.Queue().get()


def test_with_a_teardown_that_waits(never_set):
    pass


def test_that_ends():
    pass
"""


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [["-n", "1"], ["-n", "0"]], ids=["side by side", "alone"])
def test_that_hangs_fails_with_all_stacks_and_the_next_one_runs(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SETTINGS)
    (tmp_path / "test_waiting.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.hangs", "--timeout", "600", "-rfE", *options]
    # A session of its own: processes of this one that wait for the CPU say nothing about a test of that one.
    session = {patience.SESSION_VARIABLE: str(tmp_path)}
    environment = os.environ | {"PYTHONPATH": str(ROOT), patience.PACE_VARIABLE: "0.01"} | session
    done = patience.run_command([*command, "test_waiting.py"], cwd=tmp_path, env=environment)
    assert "2 passed" in done.stdout, "the test itself of the teardown, and the last one"
    assert "1 failed" in done.stdout
    assert "1 error" in done.stdout
    assert "FAILED test_waiting.py::test_that_waits - Failed: neither this process nor" in done.stdout
    assert "ERROR test_waiting.py::test_with_a_teardown_that_waits - Failed: neither this" in done.stdout
    assert "queue.Queue().get()" in done.stdout
    assert "in wait_in_a_thread" in done.stdout
