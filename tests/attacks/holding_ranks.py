"""Ranks whose task holds four weights: what each of them has once all take part, it prints.

Run with a RunSpec, a rank and what this rank claims to hold: weights and steps done.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.orders import Begin, OpenHub, order_to_line
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime, TaskSpec
from tests.linked_ranks import HUB_KEY, LINK_KEY, link

PROGRAM = """
import dataclasses, json, os, sys
import numpy as np
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.tasks.session import TASKS, RankSession
from csdctl.worker.tasks.task import FINISHED, ModelTask

hub_command = [sys.executable, "-m", "csdctl.worker", "hub", "--descriptor"]

spec, rank, (weight, steps) = from_json(RunSpec, sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])

class Holds(ModelTask):
    sum_sizes = ((1, 0),)
    max_message_bytes = 0
    values = [np.full(4, weight, np.float32)]

    def __init__(self, context):
        self.spec, self.me, self.progress = context.spec, context.me, context.progress
        self.reporter, self.is_root = context.reporter, context.me.rank == 0

    def load(self):
        self.progress.position = dataclasses.replace(self.progress.position, total_steps=steps)

    def run(self, communicator):
        held = [self.values[0].tolist(), self.progress.position.total_steps]
        print(json.dumps({"held": held}), flush=True)
        return FINISHED

    def finish(self, reason):
        pass

TASKS["holds"] = "__main__:Holds"
if len(sys.argv) > 4:
    exec(sys.argv[4])
RankSession(spec, rank, hub_command).run()
os._exit(0)
"""


def hold(claims: list[tuple[float, int]], hostile: str = "") -> list[list[dict[str, Any]]]:
    """Let ranks that hold these weights and steps take part; return what each of them printed.

    `hostile`: code that the last rank runs first.
    """
    run_id = f"attack-{os.getpid()}-{time.monotonic_ns()}"
    rank_specs = [RankSpec(rank, f"m{rank}", 8, Runtime(), None, None, 0, 80) for rank in range(len(claims))]
    spec = RunSpec(
        *(run_id, "", "", Recipe(), tuple(rank_specs), None, None, ""),
        task=TaskSpec("holds"),
        link_key=LINK_KEY,
    )
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", PROGRAM, to_json(spec), str(rank), json.dumps(claim)),
                *([hostile] if hostile and rank == len(claims) - 1 else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, claim in enumerate(claims)
    ]
    stdin = ranks[0].stdin
    assert stdin
    stdin.write(order_to_line(OpenHub(HUB_KEY)) + "\n")
    stdin.write(order_to_line(Begin(tuple(range(len(claims))))) + "\n")
    stdin.flush()
    try:
        with ExitStack() as links:
            for process in ranks:
                assert process.stdout
                assert "Ready" in process.stdout.readline()
            for rank in range(1, len(claims)):
                links.enter_context(link(run_id, rank))
            return [_read(process) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _read(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Return what a rank prints until it says what it holds."""
    assert process.stdout
    found: list[dict[str, Any]] = []
    while not found or "held" not in found[-1]:
        line = process.stdout.readline()
        assert line, f"the rank ended after {found}"
        if line.startswith(("{", "@csdctl ")):
            found.append(json.loads(line.removeprefix("@csdctl ")))
    return found


def held(output: list[dict[str, Any]]) -> tuple[float, int]:
    """Return weight and steps of a rank once all take part."""
    weights, steps = output[-1]["held"]
    assert len(set(weights)) == 1
    return weights[0], steps
