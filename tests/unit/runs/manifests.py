"""The manifest, the spec and the events of a run, as `csdctl train` writes them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from csdctl.runs.directory import EventLog, RunDirectory
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.worker.protocol.events import Event
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime
from csdctl.workflows.workspace.event_stream import RunStarted

SAMPLES_OF_A_RANK = 100
BATCH_SIZE = 4


def manifest_of(nodes: Sequence[str] = ("host", "csd0"), job: str = "job") -> dict[str, Any]:
    """Return the manifest of a run with equal shards of public samples."""
    ranks = [RankPlan(node=node, batch_size=BATCH_SIZE, threads=1) for node in nodes]
    plan = Plan(job=job, job_fingerprint="0" * 16, method="equal", ranks=ranks)
    starts = range(0, SAMPLES_OF_A_RANK * len(nodes), SAMPLES_OF_A_RANK)
    return {
        "schema": 1,
        "plan": plan.model_dump(),
        "placed": [
            {
                "name": node,
                "batch_size": BATCH_SIZE,
                "num_private": 0,
                "public_start": start,
                "public_stop": start + SAMPLES_OF_A_RANK,
                "num_repeated": 0,
            }
            for node, start in zip(nodes, starts, strict=True)
        ],
        "data": {"public": "f" * 32, "private": {}},
        "noise": None,
    }


def spec_of(nodes: Iterable[str] = ("host", "csd0"), epochs: int = 1, **changes: Any) -> RunSpec:
    """Return the spec of such a run."""
    ranks = tuple(
        RankSpec(rank, node, BATCH_SIZE, Runtime(1), None, None, 0, SAMPLES_OF_A_RANK)
        for rank, node in enumerate(nodes)
    )
    spec = RunSpec("20260101-000000-abcd", "a", "w", Recipe(epochs=epochs), ranks, None, None, "output")
    return replace(spec, **changes)


def started_of(spec: RunSpec, steps_per_epoch: int, **settings: Any) -> RunStarted:
    """Return the start of a run with that spec."""
    return RunStarted(RunDirectory(Path("run")), spec, steps_per_epoch, None, **settings)


def write_events(run: RunDirectory, events: Iterable[Event], start_s: float = 0.0) -> RunDirectory:
    """Append events to the log of a run, one a second."""
    log = EventLog(run)
    for number, event in enumerate(events):
        log.append(start_s + number, event)
    log.close()
    return run
