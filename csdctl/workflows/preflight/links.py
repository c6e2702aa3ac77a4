"""Links of a fleet, made as training makes them: ranks that sum without a model. Checked, or timed."""

import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from csdctl.errors import RunError
from csdctl.fleet.checks import FLEET_NAME, LARGE_PACKETS, Check, Status
from csdctl.fleet.model import HOST_NAME, keep_nodes
from csdctl.launch.mpi_job import CHECK_LINK, TRAFFIC_CLASSES
from csdctl.shipping.deliver import deliver, pack_payload
from csdctl.shipping.store import pack_worker, store_bytes
from csdctl.supervision.run_setup import Conditions, Patience
from csdctl.transport.many import errors_of, run_on_all
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.events import SUMS, Event, Joined, NodeLost, Ready, SumTimed
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import CHECK, SUM_BYTES, SUM_RANKS, RankSpec, RunSpec, Runtime, TaskSpec
from csdctl.worker.protocol.sandbox import SandboxCheck
from csdctl.workflows.preflight.ranks import run_spec
from csdctl.workflows.workspace.workspace import Workspace

CHECKED_SUM_BYTES = 1 << 20
SUMS_DEADLINE_S = 120.0


@dataclass
class LinkCheck:
    """The result of checking the links of a fleet."""

    joined: set[str] = field(default_factory=set)
    lost: dict[str, NodeLost] = field(default_factory=dict)
    sums: list[SumTimed] = field(default_factory=list)
    sandboxes: dict[str, SandboxCheck] = field(default_factory=dict)

    def take(self, event: Event, nodes: Sequence[str]) -> None:
        """Note an event of the run. `nodes` by rank."""
        if isinstance(event, Joined):
            self.joined |= {nodes[int(rank)] for rank in event.batch_sizes}
        elif isinstance(event, Ready):
            self.sandboxes[event.node] = event.sandbox
        elif isinstance(event, NodeLost):
            self.lost.setdefault(event.node, event)
        elif isinstance(event, SumTimed):
            self.sums.append(event)


def run_link_check(
    space: Workspace, sum_bytes: Sequence[int], sum_ranks: Sequence[int], deadline_s: float
) -> LinkCheck:
    """Start a rank and a link everywhere, time sums of sizes and numbers of ranks. Failures are in `lost`."""
    fleet, run = space.fleet, space.project.new_run(is_scratch=True)
    nodes = list(fleet.machines)
    worker = store_bytes(pack_worker(), ".pyz", space.project.root, TrafficClass.CODE)
    spec = RunSpec(
        run_id=run.run_id,
        architecture="",
        weights="",
        recipe=Recipe(),
        ranks=tuple(
            RankSpec(
                rank=rank,
                node=name,
                batch_size=1,
                runtime=Runtime(),
                private=None,
                public=None,
                num_private=0,
                num_public=0,
                server=nodes.index(fleet.server_of(name)),
            )
            for rank, name in enumerate(nodes)
        ),
        public=None,
        validation=None,
        output_directory=str(run.path),
        task=TaskSpec(CHECK, {SUM_BYTES: list(sum_bytes), SUM_RANKS: list(sum_ranks)}),
        link_key=secrets.token_hex(16),
    )
    stored = store_bytes(to_json(spec).encode(), ".json", space.project.root)
    payload = pack_payload([worker, stored])

    links = LinkCheck()
    outcomes = run_on_all(
        {name: space.sessions[name] for name in nodes if name != HOST_NAME},
        lambda session: deliver(session, payload, python=fleet.python_of(session.name)),
    )
    for name, error in errors_of(outcomes).items():
        links.lost[name] = NodeLost(nodes.index(name), name, error.message, error.remedy)
    conditions = Conditions(
        patience=Patience(start_s=deadline_s, link_s=deadline_s, max_restarts=0),
        should_stop=lambda: links.joined | {*links.lost} >= {*nodes},
        traffic_classes={**TRAFFIC_CLASSES, SUMS: TrafficClass.TEST_SUMS},
    )
    able = replace(space, fleet=keep_nodes(fleet, {*nodes} - links.lost.keys()))
    run_spec(
        spec,
        path=stored.path,
        run=run,
        worker_path=worker.path,
        space=able,
        on_event=lambda event: links.take(event, nodes),
        conditions=conditions,
    )
    if not links.lost:
        shutil.rmtree(run.path, ignore_errors=True)
    return links


def judge_sandbox(machine: str, check: SandboxCheck) -> Check:
    """Return the check of one machine: a warning when it cannot run a sandbox."""
    if not check.obstacle:
        return Check(machine, "sandbox", Status.OK, "MPI is sandboxed")
    risk = "without a sandbox, MPI there accepts connections from anyone who can reach its ports"
    remedy = f"exclude the machine, or accept the risk: {risk}"
    return Check(machine, "sandbox", Status.WARN, check.obstacle, expected="MPI in a sandbox", remedy=remedy)


def judge_links(machines: Iterable[str], links: LinkCheck) -> Iterator[Check]:
    """Yield the checks of each machine's sandbox and link, and of the sum over all."""
    for name in machines:
        if name in links.sandboxes:
            yield judge_sandbox(name, links.sandboxes[name])
        if loss := links.lost.get(name):
            # Small messages have passed.
            remedy = LARGE_PACKETS if name in links.joined else loss.remedy or CHECK_LINK
            yield Check(name, "link", Status.FAIL, loss.message, expected="a link over MPI", remedy=remedy)
        elif name != HOST_NAME:
            yield Check(name, "link", Status.OK, "connected")
    for timed in links.sums[-1:]:
        size, sum_ms = timed.num_bytes >> 20, timed.sum_s * 1000
        result = f"{len(timed.ranks)} ranks, a sum of {size} MiB in {sum_ms:.1f} ms"
        yield Check(FLEET_NAME, "sum", Status.OK, result)


def measure_sums(space: Workspace, sum_bytes: Sequence[int], sum_ranks: Sequence[int]) -> list[SumTimed]:
    """Time sums of each size, over each number of ranks and all. Raises RunError when a machine fails."""
    links = run_link_check(space, sum_bytes, sum_ranks, SUMS_DEADLINE_S)
    if links.lost:
        loss = next(iter(links.lost.values()))
        raise RunError(f"sums could not be timed: {loss.message}", node=loss.node, remedy=loss.remedy)
    return links.sums
