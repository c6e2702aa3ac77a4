"""A run of three real processes on this machine, one of which is hostile: supervised, shown and stored."""

import io
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from csdctl.errors import UnreachableError
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.mpi_job import MpiJob, add_rank_traffic
from csdctl.launch.mpirun import Mpirun
from csdctl.reporting.privacy import plan_privacy
from csdctl.reporting.results import RunSummary
from csdctl.runs.directory import CappedLog, EventLog, ProjectDirectory, RunDirectory
from csdctl.shipping.store import store_bytes
from csdctl.supervision.rank_processes import OnMessage, ProcessEnded, RankMessage, RankProcess
from csdctl.supervision.run_setup import Link, Patience, RankStarter, RunSetup
from csdctl.supervision.supervisor import Supervisor
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.run_view import TrainingView
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.events import Event, Failed, Joined, NodeLost, Traffic, Warned
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime
from csdctl.worker.protocol.sandbox import CONNECTED
from csdctl.workflows.reporting.report import report
from tests.patience import scaled
from tests.unit.runs.manifests import manifest_of, started_of

NODES = ("host", "csd0", "csd1")
HOSTILE = 1
PROGRAM = Path(__file__).with_name("rank_program.py")
RANKS = tuple(RankSpec(rank, node, 8, Runtime(), None, None, 8, 0) for rank, node in enumerate(NODES))
SPEC = RunSpec("run", "", "", Recipe(), RANKS, None, None, "", noise=Noise(1.0, 8.0, 1e-5))
PATIENCE = Patience(start_s=scaled(60), silence_s=scaled(60), max_restarts=0)
MANIFEST = manifest_of(NODES) | {"noise": asdict(SPEC.noise) if SPEC.noise else None}


@dataclass(frozen=True)
class Attack:
    """Lines of the hostile rank, and when it prints them.

    `when` is 'start', 'ready' or 'training' (when all have joined).
    """

    lines: Sequence[str]
    when: str = "training"
    forever: str = ""
    """A line that is printed again and again after them."""
    leaves: bool = False
    """The rank exits afterwards, as if it were done."""


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

    def supervise(self, attack: Attack) -> None:
        """Run to the end; raises what ends the run."""
        content = {"nodes": NODES, "hostile": HOSTILE, **asdict(attack)}
        (self._directory / "spec").write_text(json.dumps(content))
        sessions = {node: LocalSession(node, self._directory) for node in NODES}
        fleet = Fleet(tuple(Node(node, "127.0.0.1", python=sys.executable) for node in NODES[1:]))
        directory = self._directory
        program = store_bytes(PROGRAM.read_bytes(), ".py", directory).path
        mpirun = Mpirun(fleet, {}, self.run_directory, sessions, program, {})
        spec = replace(SPEC, run_id=self.run_directory.run_id)
        with ExitStack() as stack:
            starter = RankStarter(spec, "spec", mpirun, self._directory, stack, lambda _: None, NOTHING)
            setup = RunSetup(
                spec.run_id,
                NODES,
                partial(self._start, starter),
                self._do_not_restart,
                self._start_link,
                self.run_directory.logs,
                0,
                is_resumable=True,
                patience=PATIENCE,
            )
            self._consume(Supervisor(setup, self._record), spec)

    def report(self) -> RunSummary:
        """Return what `csdctl report` reads from the stored events."""
        return report(self.run_directory).summary

    def lost(self) -> list[str]:
        return [event.node for event in self.events if isinstance(event, NodeLost)]

    def why_lost(self) -> str:
        """Return why the hostile rank is lost."""
        (lost,) = (event for event in self.events if isinstance(event, NodeLost))
        return lost.message

    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]

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
                add_rank_traffic([event for event in self.events if isinstance(event, Traffic)], NODES)
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
        job = MpiJob(lambda: session.converse(command), log, NOTHING, sandbox_s=0.1)
        return Link([job], lambda _: None)
