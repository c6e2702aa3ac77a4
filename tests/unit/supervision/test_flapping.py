"""Nodes that are lost and come back thousands of times: what csdctl has open and keeps does not grow."""

import gc
import os
import queue
import sys
import threading
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from csdctl.fleet.model import Fleet as FleetOfMachines
from csdctl.launch.mpirun import Mpirun
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import store_bytes
from csdctl.supervision.rank_processes import ProcessEnded, RankMessage
from csdctl.supervision.run_setup import RankStarter
from csdctl.transport.many import open_sessions
from csdctl.worker.protocol import events
from tests.patience import WAIT_S, eventually, scaled
from tests.unit.runs.manifests import spec_of
from tests.unit.supervision.scripted_ranks import Fleet
from tests.unit.transport.conftest import running_server

NUM_NODES, NUM_WARMING_UP, NUM_LOSSES, NUM_RECONNECTIONS = 64, 500, 3000, 12
BYTES_PER_LOSS = 40
"""Less than any object of Python: nothing is left of a loss."""
RANK = """\
import json, sys
print("@csdctl " + json.dumps({"event": "Ready", "rank": 1, "node": "csd0", "num_samples": 8}), flush=True)
sys.stdin.read()
"""


class Held:
    """What this process holds now."""

    def __init__(self) -> None:
        gc.collect()
        self.num_bytes = tracemalloc.get_traced_memory()[0]
        self.num_threads = threading.active_count()
        self.num_files = len(os.listdir("/proc/self/fd"))


@pytest.mark.thorough
def test_nodes_that_flap_for_an_hour_leave_nothing_behind(tmp_path: Path) -> None:
    """Up to eight at a time lose their process or their link. All come back, and an epoch ends."""
    fleet, random = Fleet(tmp_path, NUM_NODES), Random(1)
    fleet.reachable = {*range(1, NUM_NODES + 1)}
    fleet.set_patience(restart_interval_s=0.001, relink_s=0.0, stall_s=3600.0)
    held: list[Held] = []
    num_losses = 0

    def act(event: events.Event) -> None:
        nonlocal num_losses
        if isinstance(event, events.Joined) and len(event.batch_sizes) > NUM_NODES:
            fleet.rank(0).end_epoch()
        if not isinstance(event, events.EpochEnd):
            return
        fleet.processes = [fleet.rank(rank) for rank in range(NUM_NODES + 1)]
        fleet.links = [fleet.link(rank) for rank in range(1, NUM_NODES + 1)]
        fleet.events.clear()
        fleet.groups.clear()
        if num_losses >= (NUM_WARMING_UP, NUM_LOSSES)[len(held)]:
            held.append(Held())
        if len(held) == 2:
            fleet.finish()
            return
        for rank in random.sample(range(1, NUM_NODES + 1), random.randint(1, 8)):
            num_losses += 1
            fleet.rank(rank).exit() if random.random() < 0.5 else fleet.break_link(rank)

    fleet.on_event = act
    tracemalloc.start()
    try:
        fleet.run()
    finally:
        tracemalloc.stop()
    before, after = held
    assert (after.num_threads, after.num_files) == (before.num_threads, before.num_files)
    assert after.num_bytes - before.num_bytes < BYTES_PER_LOSS * (NUM_LOSSES - NUM_WARMING_UP)
    fleet.assert_nothing_left()


def test_connections_that_are_lost_are_closed_with_all_that_belongs_to_them(tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as server, ExitStack() as stack:
        project = ProjectDirectory(tmp_path)
        node = server.node(python=sys.executable)
        server.trust_in(project.root)
        program = store_bytes(RANK.encode(), ".py", server.state).path
        fleet = FleetOfMachines((node,))
        opened = stack.enter_context(open_sessions(fleet, directory=project.root))
        sessions, run = dict(opened.reachable), project.new_run()
        mpirun = Mpirun(fleet, {}, run, sessions, program, {})
        starter = RankStarter(spec_of(), "spec", mpirun, project.root, stack, lambda sent: None)
        messages: queue.Queue[RankMessage] = queue.Queue()
        process, held = starter.start(1), list[Held]()
        for _ in range(NUM_RECONNECTIONS):
            process.listen(messages.put)
            assert isinstance(messages.get(timeout=scaled(WAIT_S)), events.Ready)
            held.append(Held())
            for connection in server.connections:
                server.loop.call_soon_threadsafe(connection.abort)
            assert isinstance(messages.get(timeout=scaled(WAIT_S)), ProcessEnded)
            process.close()
            process = starter.restart(1)
        process.close()
        second = held[1]  # the first connection has no lock of its own
        assert eventually(lambda: Held().num_threads <= second.num_threads)
        assert eventually(lambda: Held().num_files <= second.num_files)
