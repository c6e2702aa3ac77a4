"""A node that sends anything in place of events: it is lost, and named, and the others go on.

The ranks are processes of this machine, started, supervised, shown and stored as csdctl does it.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import CsdctlError, RunError
from csdctl.runs.directory import MAX_LOG_BYTES, EventLog
from csdctl.supervision.rank_processes import MAX_EVENTS_AT_ONCE
from csdctl.worker.protocol.events import EpochEnd, Finished, Progress
from tests.attacks.rank_program import END, STEP
from tests.attacks.small_run import MANIFEST, NODES, Attack, SmallRun

pytestmark = pytest.mark.first(1)

HOST, ME, OTHER = range(3)
FINISHED = {"epochs": 1, "steps": 1, "weights_hash": "h", "peak_memory_bytes": 1}
JOINED: dict[str, Any] = {
    "epoch": 1,
    "step": 0,
    "steps_per_epoch": 1,
    "total_steps": 0,
    "batch_sizes": {"0": 8, "1": 8},
    "lost": [[2, "its link was lost"]],
}


def event(name: str, rank: Any = ME, node: Any = NODES[ME], **fields: Any) -> str:
    return "@csdctl " + json.dumps({"event": name, "rank": rank, "node": node, **fields})


def progress(**changes: Any) -> str:
    return event("Progress", **STEP | changes)


def sent(what: str, sender: int) -> str:
    row = {"what": what, "sender": sender, "receiver": 0, "num_bytes": 1}
    return event("Traffic", sent=[row])


CRAFTED = {
    # as somebody else
    "progress of another rank": event("Progress", OTHER, NODES[OTHER], **STEP),
    "failure with another node's name": event("Failed", ME, NODES[OTHER], message="disk full"),
    "rank that does not exist": event("Progress", 99, **STEP),
    "loss of another node": event("NodeLost", OTHER, NODES[OTHER], message="gone"),
    # what only rank 0 knows
    "who takes part": event("Joined", **JOINED),
    "seconds of a sum": event("SumTimed", ranks=[0, 1, 2], num_bytes=4, sum_s=1e-9),
    "traffic of others": sent("sums", 2),
    "batch sizes": event("Rebalanced", epoch=1, step=1, slowest="csd9", slowdown=2, batch_sizes={"99": 1}),
    "traffic of a rank that does not exist": sent("sums", 99),
    "checkpoint": event("CheckpointSaved", epoch=1, step=1, path="/etc/passwd"),
    "loss of all ranks": progress(loss=0.0),
    "path of the model": event("Finished", **FINISHED, model_path="/etc/passwd"),
    # of another type
    "rank as text": event("Progress", "x", **STEP),
    "steps as text": progress(steps="many"),
    "metrics in metrics": progress(metrics={"a": {"b": []}}),
    # out of range
    "no steps": progress(steps=0),
    "endless seconds": progress(wall_s=math.inf),
    "seconds beyond the largest float": progress().replace("0.2", "1e400"),
    "epoch 10**400": event("EpochEnd", **END | {"epoch": 10**400}),
    "integer of 5000 digits": progress().replace('"samples": 8', '"samples": ' + "9" * 5000),
    "message of 1 MB": event("Failed", message="x" * 10**6),
    # names that do not exist
    "waiting for an unknown node": event("WaitingFor", nodes=["csd7"]),
    "unknown event": event("Dance"),
    # no event at all
    "brackets 100,000 deep": "@csdctl " + "[" * 100_000,
    "string without an end": '@csdctl "' + '\\"' * 400_000 + "[" * 100,
}


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return SmallRun(tmp_path)


def assert_others_went_on(run: SmallRun) -> None:
    assert run.lost() == [NODES[ME]]
    assert {found.node for found in run.events if isinstance(found, Finished)} >= {"host", "csd1"}
    summary = run.report()
    assert (summary.state, summary.lost_nodes, summary.num_unreadable) == ("completed", (NODES[ME],), 0)
    assert summary.samples == 16


@pytest.mark.attack(9)
@pytest.mark.parametrize("name", CRAFTED)
def test_node_that_sends_an_invalid_event_is_lost_alone(run: SmallRun, name: str) -> None:
    run.supervise(Attack([CRAFTED[name]]))
    assert_others_went_on(run)
    found = run.why_lost()
    assert "expected" in found
    assert len(found) < 1000
    assert found.replace("\n", "").isprintable()


@pytest.mark.attack(9)
def test_invalid_event_before_training_ends_the_run_and_names_the_node(run: SmallRun) -> None:
    with pytest.raises(CsdctlError) as caught:
        run.supervise(Attack([CRAFTED["failure with another node's name"]], when="start"))
    assert type(caught.value) is RunError
    assert caught.value.node == NODES[ME]
    assert caught.value.message.startswith("sent an invalid event: ")
    assert "check that machine" in caught.value.remedy
    assert run.report().state == "interrupted"  # nothing recorded how its csdctl ended


@pytest.mark.attack(9)
def test_completion_before_training_ends_the_run_and_names_the_node(run: SmallRun) -> None:
    with pytest.raises(RunError, match="reported its completion before the run was complete") as caught:
        run.supervise(Attack([event("Finished", **FINISHED)], when="ready", leaves=True))
    assert caught.value.node == NODES[ME]


@pytest.mark.attack(9)
@pytest.mark.parametrize(
    ("later", "warning"),
    [
        ([], ""),
        ([progress()], "Progress: expected nothing after Finished"),
        ([event("Failed", message="disk full", exit_code=2)], "disk full"),
    ],
    ids=["then leaves", "then a step", "then fails"],
)
def test_node_that_reports_its_completion_early_is_lost_alone(
    run: SmallRun, later: list[str], warning: str
) -> None:
    run.supervise(Attack([event("Finished", **FINISHED), *later], leaves=True))
    assert_others_went_on(run)
    assert run.why_lost() == "reported its completion before the run was complete"
    assert [warning in told for told in run.warnings()] == [True] * bool(warning)


@pytest.mark.attack(9)
def test_node_that_fails_is_lost_alone_whatever_its_exit_code(run: SmallRun) -> None:
    """A lone surrogate is half of a character: no terminal and no file takes it."""
    run.supervise(Attack([event("Failed", message="half \ud800 a character", exit_code=2)]))
    assert_others_went_on(run)
    assert run.report().failures == ("csd0: half ? a character",)


@pytest.mark.attack(9)
@pytest.mark.attack(12)
@pytest.mark.parametrize(
    "line", [progress(), event("WaitingFor", nodes=[NODES[OTHER]])], ids=["progress", "waiting for a node"]
)
def test_node_that_floods_csdctl_with_valid_events_is_lost_alone(run: SmallRun, line: str) -> None:
    run.supervise(Attack([], forever=line))
    assert_others_went_on(run)
    assert "expected at most" in run.why_lost()
    assert len(run.events) < MAX_EVENTS_AT_ONCE + 1000
    assert run.run_directory.events.stat().st_size < 8 << 20


@pytest.mark.attack(12)
def test_output_without_end_is_dropped_after_a_limit(run: SmallRun) -> None:
    """The node is not lost for what it prints; it ends the attack with an event that no rank sends."""
    num_lines = (MAX_LOG_BYTES + (2 << 20)) // 1000
    run.supervise(Attack(["x" * 1000] * num_lines + [event("Dance")]))
    assert_others_went_on(run)
    assert run.log().endswith("\n… further output of csd0 is dropped after 16 MiB\n")
    assert len(run.log()) < MAX_LOG_BYTES + 200
    assert run.log(OTHER) == ""


REPORTER = """
import resource, sys
from pathlib import Path
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.reporting.report import report
run_id = next((Path(sys.argv[1]) / ".csdctl/runs").iterdir()).name
print(report(ProjectDirectory(Path(sys.argv[1])).find_run(run_id)).summary.epochs, end=" ")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def report_memory_kib(run: SmallRun, num_epochs: int) -> int:
    """Store so many epochs of three ranks, and return the memory of a process that reports them."""
    run.run_directory.save_manifest({**MANIFEST, "noise": None})
    log = EventLog(run.run_directory)
    log.append(1.0, Progress(ME, NODES[ME], 1, 1, 1, 8, 0.1, 0.1, 0.2))
    log.close()
    step = run.run_directory.events.read_text()
    with run.run_directory.events.open("w") as file:
        for _ in range(num_epochs):
            file.write(step * 300)
    log = EventLog(run.run_directory)
    for epoch in range(1, num_epochs + 1):
        for rank, node in enumerate(NODES):
            log.append(1.0, EpochEnd(rank, node, epoch, 10, 80, 1.0, 1.0, 2.0, f"h{epoch}"))
    log.close()
    command = [sys.executable, "-c", REPORTER, str(run.project.root)]
    epochs, memory = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(epochs) == num_epochs
    return int(memory)


@pytest.mark.attack(12)
def test_memory_of_a_report_does_not_grow_with_the_stored_events(tmp_path: Path) -> None:
    """The 60,000 events of the long run would take 40 MiB as objects."""
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
    short, long = SmallRun(tmp_path / "short"), SmallRun(tmp_path / "long")
    few = report_memory_kib(short, 2)
    many = report_memory_kib(long, 200)
    assert long.run_directory.events.stat().st_size > 10 << 20
    assert many < few + (8 << 10)
