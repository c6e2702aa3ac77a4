"""The session of a rank, in a process of its own that receives orders on its standard input."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.events import Finished, Ready, event_from_line
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.orders import Begin, OpenHub, Order, Ping, order_to_line
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime, TaskSpec
from csdctl.worker.tasks.task import ORPHAN_S, Orders
from tests.patience import WAIT_S, eventually

PROGRAM = """
import os, sys
from csdctl.worker.protocol.events import Finished
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.tasks.session import TASKS, RankSession
from csdctl.worker.tasks.task import FINISHED

class Alone:
    sum_sizes = ((1, 0),)
    values = ()
    max_message_bytes = 0

    def __init__(self, context):
        self.reporter = context.reporter

    def load(self):
        print("loaded", flush=True)

    def settle(self, communicator, before, hashes):
        print("begins with", communicator.members, "after", before, flush=True)

    def run(self, communicator):
        print("runs with", communicator.members, flush=True)
        return FINISHED

    def finish(self, reason):
        self.reporter.emit(Finished, 1, 0, "", 0)

TASKS["alone"] = "__main__:Alone"
RankSession(from_json(RunSpec, sys.argv[1]), 0, []).run()
os._exit(0)
"""


def test_rank_alone_begins_when_it_is_told_to_and_needs_no_hub() -> None:
    ranks = (RankSpec(0, "host", 8, Runtime(), None, None, 0, 80),)
    spec = RunSpec("alone", "", "", Recipe(), ranks, None, None, "", task=TaskSpec("alone"))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, to_json(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        lines = [process.stdout.readline().strip() for _ in range(2)]
        # The input stays open: a rank exits when it ends.
        process.stdin.write(order_to_line(Begin((0,))) + "\n")
        process.stdin.flush()
        lines += process.stdout.read().splitlines()
        errors = process.stderr.read()
        assert process.wait() == 0, errors
    kinds = [type(event_from_line(line)) if line.startswith("@") else line for line in lines]
    assert kinds == ["loaded", Ready, "begins with (0,) after ()", "runs with (0,)", Finished]


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Order], None]]:
    """Send orders to a rank, which exits when its input ends."""
    receiving, sending = os.pipe()
    exited = threading.Event()
    monkeypatch.setattr(sys, "stdin", os.fdopen(receiving))
    monkeypatch.setattr(os, "_exit", lambda code: exited.set())
    yield lambda order: os.write(sending, order_to_line(order).encode() + b"\n")  # type: ignore[func-returns-value]
    os.close(sending)
    assert exited.wait(WAIT_S)


def test_rank_that_has_loaded_for_long_waits_for_its_orders(send: Callable[[Order], None]) -> None:
    """Whichever comes first."""
    orders = Orders(lambda number: None)
    orders._heard -= 2 * ORPHAN_S
    threading.Timer(0.2, send, [Begin((0, 1))]).start()
    threading.Timer(0.3, send, [OpenHub("key")]).start()
    assert orders.wait(orders.hubs).key == "key"
    assert orders.wait(orders.begins).ranks == (0, 1)


def test_rank_that_waits_without_any_order_is_an_orphan(send: Callable[[Order], None]) -> None:
    orders = Orders(lambda number: None)
    orders.check_orphaned()
    orders._heard -= 2 * ORPHAN_S
    with pytest.raises(WorkerError, match="received no order for 600 s: csdctl has exited"):
        orders.check_orphaned()
    send(Ping(1))
    assert eventually(lambda: time.monotonic() - orders._heard < ORPHAN_S)
    orders.check_orphaned()
