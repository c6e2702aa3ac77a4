"""Run the ranks of a spec: start, supervise, end, and add up what was sent.

Whatever happens, no process of the run is left on any machine: processes with its id are ended over SSH.
"""

import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from csdctl.fleet.model import HOST_NAME
from csdctl.launch.leftovers import end_run
from csdctl.launch.mpi_job import add_rank_traffic
from csdctl.launch.mpirun import Mpirun
from csdctl.reporting.tally import members_of, newcomers_of
from csdctl.runs.directory import RunDirectory
from csdctl.supervision.run_setup import Conditions, RankStarter
from csdctl.supervision.supervisor import Supervisor
from csdctl.worker.protocol.events import Event, Joined, Ready, SentBytes, Traffic
from csdctl.worker.protocol.run_spec import STEPPING, RunSpec
from csdctl.worker.protocol.sandbox import SandboxCheck
from csdctl.workflows.workspace.workspace import Workspace


class TrafficCount:
    """Adds up what the ranks of a run report to have sent. Each link counts anew when its rank joins."""

    def __init__(self) -> None:
        self._earlier: Counter[tuple[str, int, int]] = Counter()
        self._latest: dict[tuple[str, int, int], int] = {}
        """Since the ranks have joined: bytes by class, sender and receiver."""
        self._members: frozenset[int] = frozenset()

    def add(self, event: Event) -> None:
        """Add an event of the run. Only some change the count."""
        if isinstance(event, Traffic):
            self._latest |= {(row.what, row.sender, row.receiver): row.num_bytes for row in event.sent}
        elif isinstance(event, Joined):
            newcomers, self._members = newcomers_of(event, self._members), members_of(event)
            for row in [row for row in self._latest if newcomers & set(row[1:])]:
                self._earlier[row] += self._latest.pop(row)

    @property
    def total(self) -> Traffic:
        """Bytes that all ranks have sent so far."""
        counts = self._earlier + Counter(self._latest)
        return Traffic(0, HOST_NAME, tuple(SentBytes(*row, count) for row, count in counts.items()))


def run_spec(
    spec: RunSpec,
    path: str,
    run: RunDirectory,
    worker_path: str,
    space: Workspace,
    on_event: Callable[[Event], None],
    conditions: Conditions,
) -> str:
    """Run the ranks of `spec`, at `path` everywhere. Return who stopped them (`Supervisor.stopped_by`)."""
    fleet = space.whole
    nodes = [rank.node for rank in spec.ranks]
    sessions = {name: space.sessions[name] for name in nodes if name in space.fleet.machines}
    late = {rank: space.unreachable[name] for rank, name in enumerate(nodes) if name in space.unreachable}
    sandboxes: dict[str, SandboxCheck] = {}
    mpirun = Mpirun(
        fleet=fleet,
        facts=space.facts,
        run=run,
        sessions=sessions,
        worker_path=worker_path,
        sandboxes=sandboxes,
        link_key=spec.link_key,
        hub_key=secrets.token_hex(16),  # unlike the spec, no node has it
        state_bytes=3 * conditions.model_bytes,
    )
    traffic = TrafficCount()

    def handle_event(event: Event) -> None:
        if isinstance(event, Ready):
            sandboxes[event.node] = event.sandbox
        traffic.add(event)
        on_event(event)

    if spec.task.name not in STEPPING:  # no report for minutes: an hour in place of 5 minutes
        patience = replace(conditions.patience, silence_s=12 * conditions.patience.silence_s)
        conditions = replace(conditions, patience=patience)
    with ExitStack() as stack:
        opening = space.project.root, stack, space.ledger.add
        starter = RankStarter(spec, path, mpirun, *opening, conditions.prepare_late_node)
        supervisor = Supervisor(starter, conditions, handle_event, late)
        is_over = False
        try:
            supervisor.run()
            is_over = True  # what is left of the run is on the disk of this machine
        finally:
            # End all processes first: a full disk must not prevent that.
            starter.over.set()
            end_run(spec.run_id, dict(sessions), fleet, is_removing=is_over)
            space.ledger.add(add_rank_traffic(traffic.total, nodes, conditions.traffic_classes))
            space.ledger.add(supervisor.mpirun_bytes)
    return supervisor.stopped_by
