"""A run of many ranks as its files have it, for what watches runs: nothing trains."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from csdctl.launch.leftovers import describe_holder
from csdctl.runs.directory import RunDirectory
from csdctl.worker.protocol.events import Event, Joined, NodeLost, Progress, Ready, event_document
from csdctl.worker.protocol.json_codec import to_json
from tests.unit.runs.manifests import manifest_of, spec_of

RUN_ID = "20261123-084636-637095"
START_S = 1_795_420_000.0
NUM_STEPS, EPOCHS = 100, 4
NUM_EVEN, NUM_HELD = 20, 40
"""Seconds in which all ranks take as long, and in which they wait for rank 3."""
SLOW = 3
BATCH = 8


def name_of(rank: int) -> str:
    return f"csd{rank - 1}" if rank else "host"


def write_run(project: Path, num_ranks: int) -> RunDirectory:
    """Write a run that this process trains, for a minute; rank 3 is slow, and of 37 two stand still."""
    run = RunDirectory(project / ".csdctl" / "runs" / RUN_ID)
    run.path.mkdir(parents=True)
    nodes = [name_of(rank) for rank in range(num_ranks)]
    manifest = manifest_of(nodes)
    manifest["plan"]["emulated"] = True
    run.save_manifest(manifest)
    with run.events.open("w") as file:
        for time_s, event in make_events(num_ranks):
            file.write(json.dumps({"time": time_s, **event_document(event)}) + "\n")
    os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)  # which tells this process from others
    run.process.write_text(json.dumps(describe_holder("train", project)))
    run.spec.write_text(to_json(spec_of(nodes, EPOCHS, run_id=RUN_ID)))
    assert describe_holder("train", project)["pid"] == os.getpid()
    return run


def make_events(num_ranks: int) -> Iterator[tuple[float, Event]]:
    """Yield Unix time and event."""
    sizes = {str(rank): BATCH for rank in range(num_ranks)}
    for rank in range(num_ranks):
        yield START_S, Ready(rank, name_of(rank), 800)
    yield START_S, Joined(0, name_of(0), 1, 0, NUM_STEPS, 0, sizes, is_start=True)
    for second, rank in itertools.product(range(NUM_EVEN + NUM_HELD), range(num_ranks)):
        is_held = second >= NUM_EVEN
        compute_s = 0.9 if rank == SLOW and is_held else 0.3
        others_s = (0.9 if is_held else 0.3) - compute_s
        loss = 2.0 / (second + 1) if rank == 0 else None
        yield (
            START_S + second + 1,
            Progress(
                rank,
                name_of(rank),
                1,
                second + 1,
                1,
                BATCH,
                compute_s,
                others_s + 0.02,
                1.0,
                BATCH * num_ranks if rank == 0 else 0,
                loss,
                None if loss is None else (second + 1) / 70,
                input_s=0.0,
                others_s=others_s,
                memory_bytes=700 << 20,
            ),
        )
    if num_ranks > 30:
        yield START_S + 61, NodeLost(30, name_of(30), "no answer for 30 s")
        yield START_S + 61, NodeLost(12, name_of(12), "killed")
