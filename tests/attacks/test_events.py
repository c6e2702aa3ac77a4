"""A node that sends anything in place of events: it is lost, and named, and the others go on.

The ranks are processes of this machine, started, supervised, shown and stored as csdctl does it.
"""

import io
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.errors import UnreachableError
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.mpi_job import TRAFFIC_CLASSES, MpiJob, add_rank_traffic
from csdctl.launch.mpirun import Mpirun
from csdctl.reporting.privacy import plan_privacy
from csdctl.reporting.results import RunSummary
from csdctl.runs.directory import MAX_LOG_BYTES, CappedLog, EventLog, ProjectDirectory, RunDirectory
from csdctl.shipping.store import store_bytes
from csdctl.supervision.rank_processes import (
    MAX_EVENTS_AT_ONCE,
    OnMessage,
    ProcessEnded,
    RankMessage,
    RankProcess,
)
from csdctl.supervision.run_setup import Conditions, Link, Patience, RankStarter
from csdctl.supervision.supervisor import Supervisor
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.run_view import TrainingView
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.events import Event, Failed, Finished, Joined, NodeLost, Traffic, Warned
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime
from csdctl.worker.protocol.sandbox import CONNECTED
from csdctl.workflows.reporting.report import report
from tests.attacks.rank_program import STEP
from tests.patience import scaled
from tests.unit.runs.manifests import manifest_of, started_of

pytestmark = pytest.mark.first(1)

HOST, ME, OTHER = range(3)
FINISHED = {"epochs": 1, "steps": 1, "weights_hash": "h", "peak_memory_bytes": 1}

NODES = ("host", "csd0", "csd1")
HOSTILE = 1
PROGRAM = Path(__file__).with_name("rank_program.py")
RANKS = tuple(RankSpec(rank, node, 8, Runtime(), None, None, 8, 0) for rank, node in enumerate(NODES))
SPEC = RunSpec("run", "", "", Recipe(), RANKS, None, None, "", noise=Noise(1.0, 8.0, 1e-5))
PATIENCE = Patience(start_s=scaled(60), silence_s=scaled(60), max_restarts=0)
MANIFEST = manifest_of(NODES) | {"noise": asdict(SPEC.noise) if SPEC.noise else None}


NOTHING: Any = None
"""The program in place of mpirun asks for none, and no machine is connected to again."""


class SmallRun:
    """Supervises host, csd0 (hostile) and csd1 with everything that consumes their events."""

    def __init__(self, directory: Path) -> None:
        self.project = ProjectDirectory(directory)
        self.run_directory: RunDirectory = self.project.new_run()
        self.run_directory.save_manifest(MANIFEST)
        self.events: list[Event] = []
        self.shown = io.StringIO()
        self._directory = directory

    def supervise(self, *lines: str, forever: str = "", leaves: bool = False) -> None:
        """Run to the end; raises what ends the run.

        The hostile rank prints `lines` when all have joined, then `forever` again and again, or exits.
        """
        content = {"nodes": NODES, "hostile": HOSTILE, "lines": lines, "forever": forever, "leaves": leaves}
        (self._directory / "spec").write_text(json.dumps(content))
        sessions = {node: LocalSession(node, self._directory) for node in NODES}
        fleet = Fleet(tuple(Node(node, "127.0.0.1", python=sys.executable) for node in NODES[1:]))
        directory = self._directory
        program = store_bytes(PROGRAM.read_bytes(), ".py", directory).path
        mpirun = Mpirun(fleet, {}, self.run_directory, sessions, program, {})
        spec = replace(SPEC, run_id=self.run_directory.run_id)
        with ExitStack() as stack:
            starter = RankStarter(spec, "spec", mpirun, self._directory, stack, lambda _: None, NOTHING)
            scripted: Any = SimpleNamespace(
                spec=spec,
                mpirun=mpirun,
                start=partial(self._start, starter),
                restart=self._do_not_restart,
                start_link=self._start_link,
            )
            conditions = Conditions(is_resumable=True, patience=PATIENCE)
            self._consume(Supervisor(scripted, conditions, self._record, {}), spec)

    def report(self) -> RunSummary:
        """Return what `csdctl report` reads from the stored events."""
        return report(self.run_directory).summary

    def lost(self) -> list[str]:
        return [event.node for event in self.events if isinstance(event, NodeLost)]

    def why_lost(self) -> str:
        """Return why the hostile rank is lost."""
        (lost,) = (event for event in self.events if isinstance(event, NodeLost))
        return lost.message

    def log(self, rank: int = HOSTILE) -> str:
        return self.run_directory.rank_log(rank).read_text()

    def _consume(self, supervisor: Supervisor, spec: RunSpec) -> None:
        self._log = EventLog(self.run_directory)
        console = PrintableConsole(file=self.shown, width=200)
        with TrainingView(console, started_of(spec, 1, emulated=True)) as self._view:
            try:
                supervisor.run()
            finally:
                self._log.close()
                for event in self.events:
                    if isinstance(event, Traffic):
                        add_rank_traffic(event, NODES, TRAFFIC_CLASSES)
                plan_privacy(spec, self.events)

    def _record(self, event: Event) -> None:
        self.events.append(event)
        self._log.append(1.0, event)
        self._view.show(event)
        if isinstance(event, Joined):
            (self._directory / "training").touch()  # handled before anything that the hostile rank now prints

    def _start(self, starter: RankStarter, rank: int) -> RankProcess:
        """Start a rank; rank 0 goes on without the hostile one when that has failed or ended, as a hub does.

        Not before: nothing orders what two ranks print, and csdctl takes the first reason that it gets.
        """
        process = starter.start(rank)
        listen = process.listen

        def pass_on(message: RankMessage, on_message: OnMessage) -> None:
            on_message(message)
            if isinstance(message, ProcessEnded | Failed):
                (self._directory / "lost").touch()

        if rank == HOSTILE:
            process.listen = lambda on_message: listen(lambda message: pass_on(message, on_message))  # type: ignore[method-assign]
        return process

    def _do_not_restart(self, rank: int) -> RankProcess:
        raise UnreachableError("is away", node=NODES[rank])

    def _start_link(self, rank: int) -> Link:
        session = LocalSession("host", self._directory)
        command = ["/bin/sh", "-c", f"echo {CONNECTED}; exec sleep 100000"]
        log = CappedLog(self._directory / "links.log", NODES[rank])
        job = MpiJob(lambda: session.converse(command), log, NOTHING)
        return Link([job], lambda _: None)


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


CRAFTED = {
    "failure with another node's name": event("Failed", ME, NODES[OTHER], message="disk full"),
    "rank that does not exist": event("Progress", 99, **STEP),
    "who takes part": event("Joined", **JOINED),
    "traffic of others": event(
        "Traffic", sent=[{"what": "sums", "sender": OTHER, "receiver": 0, "num_bytes": 1}]
    ),
    "checkpoint": event("CheckpointSaved", epoch=1, step=1, path="/etc/passwd"),
    "path of the model": event("Finished", **FINISHED, model_path="/etc/passwd"),
    "steps as text": progress(steps="many"),
    "seconds beyond the largest float": progress().replace("0.2", "1e400"),
    "message of 1 MB": event("Failed", message="x" * 10**6),
    "waiting for an unknown node": event("WaitingFor", nodes=["csd7"]),
    "unknown event": event("Dance"),
    "brackets 100,000 deep": "@csdctl " + "[" * 100_000,
}
"""One of each kind. tests/unit/worker/protocol has the types and ranges, tests/unit/supervision the order."""


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return SmallRun(tmp_path)


def assert_others_went_on(run: SmallRun) -> None:
    assert run.lost() == [NODES[ME]]
    assert {finished.node for finished in run.events if isinstance(finished, Finished)} >= {"host", "csd1"}
    summary = run.report()
    assert (summary.state, summary.lost_nodes, summary.num_unreadable) == ("completed", (NODES[ME],), 0)
    assert summary.samples == 16


@pytest.mark.attack(9)
@pytest.mark.parametrize("line", CRAFTED.values(), ids=CRAFTED)
def test_node_that_sends_an_invalid_event_is_lost_alone(run: SmallRun, line: str) -> None:
    run.supervise(line)
    assert_others_went_on(run)
    reason = run.why_lost()
    assert "expected" in reason
    assert len(reason) < 1000
    assert reason.replace("\n", "").isprintable()


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
    run.supervise(event("Finished", **FINISHED), *later, leaves=True)
    assert_others_went_on(run)
    assert run.why_lost() == "reported its completion before the run was complete"
    warnings = [event.message for event in run.events if isinstance(event, Warned)]
    assert len(warnings) == bool(warning)
    assert warning in "".join(warnings)


@pytest.mark.attack(9)
def test_node_that_fails_is_lost_alone_whatever_its_exit_code(run: SmallRun) -> None:
    """A lone surrogate is half of a character: no terminal and no file takes it."""
    run.supervise(event("Failed", message="half \ud800 a character", exit_code=2))
    assert_others_went_on(run)
    assert run.report().failures == ("csd0: half ? a character",)


@pytest.mark.attack(9)
@pytest.mark.attack(12)
@pytest.mark.parametrize(
    "line", [progress(), event("WaitingFor", nodes=[NODES[OTHER]])], ids=["progress", "waiting for a node"]
)
def test_node_that_floods_csdctl_with_valid_events_is_lost_alone(run: SmallRun, line: str) -> None:
    run.supervise(forever=line)
    assert_others_went_on(run)
    assert "expected at most" in run.why_lost()
    assert len(run.events) < MAX_EVENTS_AT_ONCE + 1000
    assert run.run_directory.events.stat().st_size < 8 << 20


@pytest.mark.attack(12)
def test_output_without_end_is_dropped_after_a_limit(run: SmallRun) -> None:
    """The node is not lost for what it prints; it ends the attack with an event that no rank sends."""
    num_lines = (MAX_LOG_BYTES + (2 << 20)) // 1000
    run.supervise(*["x" * 1000] * num_lines, event("Dance"))
    assert_others_went_on(run)
    assert run.log().endswith("\n… further output of csd0 is dropped after 16 MiB\n")
    assert len(run.log()) < MAX_LOG_BYTES + 200
    assert run.log(OTHER) == ""
