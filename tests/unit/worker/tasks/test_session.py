"""The session of a rank, in a process of its own that receives orders on its standard input."""

import os
import subprocess
import sys
import threading

import pytest

from csdctl.worker.protocol.events import Joined, Ready, event_from_line
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.orders import FormGroup, Order, Release, order_to_line
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime, TaskSpec
from csdctl.worker.tasks.task import ORPHAN_S, Orders

PROGRAM = """
import os, socket, sys
from csdctl.worker.group.channel import socket_name
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.tasks.session import TASKS, RankSession
from csdctl.worker.tasks.task import FINISHED

class Connects:
    is_resumable = False
    sum_sizes = ((1, 0),)
    variables = ()

    def __init__(self, context):
        self.run_id = context.spec.run_id

    def load(self):
        pass

    def run(self, group):
        print("ran in", group.ranks, flush=True)
        return FINISHED

    def finish(self, reason):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(socket_name(self.run_id, 0))
        print("a late link was accepted", flush=True)

TASKS["connects"] = "__main__:Connects"
RankSession(from_json(RunSpec, sys.argv[1]), 0).run()
os._exit(0)
"""


def test_links_are_accepted_until_the_task_has_finished() -> None:
    ranks = (RankSpec(0, "host", 8, Runtime(), None, None, 0, 80),)
    run_id, task = f"session-test-{os.getpid()}", TaskSpec("connects")
    spec = RunSpec(run_id, "", "", Recipe(), ranks, None, None, "", task=task)
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
        # The input stays open: a rank exits when it ends.
        process.stdin.write(order_to_line(FormGroup(1, (0,))) + "\n")
        process.stdin.flush()
        lines = process.stdout.read().splitlines()
        errors = process.stderr.read()
        assert process.wait() == 0, errors
    assert [type(event_from_line(line)) for line in lines[:2]] == [Ready, Joined]
    assert lines[2:] == ["ran in (0,)", "a late link was accepted"]


def test_rank_that_trained_for_long_without_an_order_waits_for_the_next_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiving, sending = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(receiving))

    def send(order: Order) -> None:
        os.write(sending, order_to_line(order).encode() + b"\n")

    orders = Orders(lambda number: None)
    orders._heard -= 2 * ORPHAN_S
    threading.Timer(0.2, send, [FormGroup(2, (0, 1))]).start()
    assert orders.next_group().generation == 2
    send(Release())
    orders.await_release()
    os.close(sending)
