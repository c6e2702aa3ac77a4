"""`doctor`: whether a fleet is fit to train, found out by trying, under a deadline.

In order: the host, the way to every node, what each machine is, which pairs can connect, and at last a
hello over all that are fit so far. A machine that is red takes no part in what follows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.errors import (
    CsdctlError,
    DeadlineError,
    InputError,
    NodeError,
    NoNodeReachableError,
    PartialError,
)
from csdctl.fleet.checks import (
    FLEET_NAME,
    Check,
    Status,
    judge_error,
    judge_hostnames,
    judge_machine,
    judge_network,
    judge_open_files,
    judge_prefixes,
    red_machines,
)
from csdctl.fleet.condition import Condition
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.network import is_checked
from csdctl.fleet.select import keep_nodes
from csdctl.launch.tools import find_mpirun, find_ssh, mpi_version, ssh_version
from csdctl.probes.condition import collect_condition
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import note_traffic
from csdctl.transport.many import Outcome, open_sessions, run_on_all
from csdctl.transport.process import Deadline
from csdctl.transport.session import Session
from csdctl.workflows.preflight.mpi_check import check_mpi
from csdctl.workflows.preflight.reachability import check_reachability

PROBE_DEADLINE_S = 60.0
DOORS_DEADLINE_S = 20.0
MEND = "mend what is red above"

Tell = Callable[[Check], None]


@dataclass(frozen=True)
class DoctorOptions:
    """How long the whole may take, the connection to one node, and the hello; in seconds."""

    deadline_s: float = 180.0
    connect_deadline_s: float = 10.0
    hello_deadline_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in (
            ("", self.deadline_s),
            ("connect ", self.connect_deadline_s),
            ("hello ", self.hello_deadline_s),
        ):
            if not value >= 1:
                raise InputError(f"the {name}deadline must be 1 second at least, received {value:g}")


@dataclass
class Examination:
    """What was found out so far; every check is also told at once."""

    fleet: Fleet
    tell: Tell
    checks: list[Check] = field(default_factory=list)
    overdue: str = ""
    """Which part was not finished when the deadline passed; '' when it did not pass."""

    def add(self, check: Check) -> None:
        """Note one check, and tell it."""
        self.checks.append(check)
        self.tell(check)

    @property
    def red(self) -> list[str]:
        """The machines with a red check; `fleet` among them when the common check is red."""
        return red_machines(self.checks)

    def check(self) -> None:
        """Raise the error that the exit code comes from; nothing when no check is red."""
        nodes = [node.name for node in self.fleet.nodes]
        unreachable = [
            one.machine for one in self.checks if one.check == "reach" and one.status == Status.FAIL
        ]
        if set(nodes) <= set(unreachable):
            raise NoNodeReachableError(f"no node of {self.fleet.path} can be reached", remedy=MEND)
        if self.overdue:
            raise DeadlineError(
                f"the deadline passed while {self.overdue}", remedy="raise --deadline, or examine fewer nodes"
            )
        if HOST_NAME in self.red:
            raise CsdctlError("the host is not fit to train", remedy=MEND)
        red = [name for name in nodes if name in self.red]
        if red and len(red) == len(nodes):
            raise CsdctlError(f"not one of the {len(nodes)} nodes is fit to train", remedy=MEND)
        if FLEET_NAME in self.red:
            raise CsdctlError("the machines do not train together", remedy=MEND)
        if red:
            raise PartialError(
                f"{len(red)} of {len(nodes)} nodes are not fit to train: {', '.join(red)}",
                remedy=f"{MEND}, or leave them out: --exclude {','.join(red)}",
            )

    def check_before_training(self) -> None:
        """Raise one error that says all that is red; for a command that shows no table."""
        red = [one for one in self.checks if one.status == Status.FAIL]
        if len(red) == 1 and red[0].machine != FLEET_NAME:
            raise NodeError(describe(red[0]), node=red[0].machine, remedy=red[0].remedy)
        if red:
            listed = "\n".join(
                f"  {one.machine}: {describe(one)}" + (f"\n    → {one.remedy}" if one.remedy else "")
                for one in red
            )
            raise CsdctlError(
                f"the preflight found what would make the run fail:\n{listed}",
                remedy="mend it, leave nodes out with --exclude, or train all the same with --skip-doctor",
            )
        if self.overdue:
            raise DeadlineError(
                f"the preflight's deadline passed while {self.overdue}", remedy="--skip-doctor"
            )


def describe(check: Check) -> str:
    """A check in one line, without machine and remedy."""
    return f"{check.check}: {check.found}" + (f" (expected {check.expected})" if check.expected else "")


def examine(
    fleet: Fleet, directory: Path, options: DoctorOptions, tell: Tell = lambda check: None
) -> Examination:
    """Examine the host and all nodes of `fleet`; what is red is in the result, not raised."""
    examination = Examination(fleet, tell)
    clock = Deadline(options.deadline_s)
    _examine_host(examination)

    def reached(outcome: Outcome[Session]) -> None:
        examination.add(_judge_reached(outcome))
        _check_clock(clock, "connecting")

    try:
        with open_sessions(
            fleet,
            directory=directory,
            connect_deadline_s=min(options.connect_deadline_s, clock.left_s),
            on_done=reached,
            on_traffic=note_traffic(directory, "doctor"),
        ) as sessions:
            examine_machines(examination, sessions.reachable, directory, options, clock)
    except DeadlineError as error:
        examination.overdue = error.message
    return examination


def examine_open(
    fleet: Fleet,
    sessions: Mapping[str, Session],
    directory: Path,
    options: DoctorOptions,
    tell: Tell = lambda check: None,
) -> Examination:
    """Like `examine`, over sessions that are open already, to the host and to every node of `fleet`."""
    examination = Examination(fleet, tell)
    _examine_host(examination)
    try:
        examine_machines(examination, sessions, directory, options, Deadline(options.deadline_s))
    except DeadlineError as error:
        examination.overdue = error.message
    return examination


def examine_machines(
    examination: Examination,
    sessions: Mapping[str, Session],
    directory: Path,
    options: DoctorOptions,
    clock: Deadline,
) -> None:
    """What each machine is, who can connect, the hello; raises DeadlineError with what was under way."""
    fleet = examination.fleet
    found = _measure(examination, sessions, clock)
    conditions = {name: condition for name, (_, condition) in found.items()}
    facts = {name: one for name, (one, _) in found.items()}
    if not fleet.emulated:
        for check in judge_hostnames(conditions.values()):
            examination.add(check)
    for check in judge_prefixes(facts[name] for name in _fit(examination, conditions) if name != HOST_NAME):
        examination.add(check)
    fit = _fit(examination, conditions)
    if len(fit) > 1 and is_checked(fleet.network):
        _check_clock(clock, "knocking at doors")
        deadline_s = min(DOORS_DEADLINE_S, clock.left_s)
        for check in check_reachability(
            fleet, {name: sessions[name] for name in fit}, conditions, deadline_s
        ):
            examination.add(check)
    fit = _fit(examination, conditions)
    if HOST_NAME not in fit or len(fit) == 1:
        why = "not tried: " + ("the host is red" if HOST_NAME not in fit else "no node is fit")
        examination.add(Check(FLEET_NAME, "mpi", Status.WARN, why, remedy=MEND))
        return
    _check_clock(clock, "saying hello")
    check_mpi(
        keep_nodes(fleet, fit),
        facts,
        sessions,
        ProjectDirectory(directory),
        max(1.0, min(options.hello_deadline_s, clock.left_s)),
        examination.add,
    )


def _examine_host(examination: Examination) -> None:
    """What starts the ranks: the ssh client and mpirun."""
    try:
        name = ssh_version(find_ssh())
        is_usable = name.startswith("OpenSSH")
        status = Status.OK if is_usable else Status.FAIL
        remedy = "" if is_usable else "install it: `apt-get install openssh-client`"
        examination.add(Check(HOST_NAME, "ssh", status, name, "" if is_usable else "OpenSSH", remedy))
    except CsdctlError as error:
        examination.add(judge_error(HOST_NAME, "ssh", error))
    try:
        examination.add(Check(HOST_NAME, "mpirun", Status.OK, f"{find_mpirun()} ({mpi_version()})"))
    except CsdctlError as error:
        examination.add(judge_error(HOST_NAME, "mpirun", error))


def _judge_reached(outcome: Outcome[Session]) -> Check:
    if outcome.error:
        return judge_error(outcome.name, "reach", outcome.error)
    assert outcome.value is not None
    return Check(outcome.name, "reach", Status.OK, outcome.value.host_key_fingerprint)


def _measure(
    examination: Examination, sessions: Mapping[str, Session], clock: Deadline
) -> dict[str, tuple[Facts, Condition]]:
    """Facts and condition of every machine that tells them; judged as soon as the host's are there."""
    fleet = examination.fleet
    found: dict[str, tuple[Facts, Condition]] = {}
    judged: set[str] = set()

    def measure(session: Session) -> tuple[Facts, Condition]:
        python = fleet.python_of(session.name)
        return collect_condition(session, python, deadline_s=min(PROBE_DEADLINE_S, clock.left_s))

    def measured(outcome: Outcome[tuple[Facts, Condition]]) -> None:
        if outcome.value:
            found[outcome.name] = outcome.value
        elif outcome.error:
            examination.add(judge_error(outcome.name, "probe", outcome.error))
        if HOST_NAME in found:
            for name in [name for name in found if name not in judged]:
                judged.add(name)
                _judge(examination, *found[name], host=found[HOST_NAME][0])
        _check_clock(clock, "asking the machines what they are")

    run_on_all(sessions, measure, on_done=measured)
    return {name: found[name] for name in sessions if name in found}


def _judge(examination: Examination, facts: Facts, condition: Condition, *, host: Facts) -> None:
    python = examination.fleet.python_of(facts.name)
    for check in judge_machine(facts, condition, host, python=python):
        examination.add(check)
    if facts.name == HOST_NAME:
        num_nodes = len(examination.fleet.nodes)
        examination.add(judge_open_files(HOST_NAME, condition.open_files, num_nodes))
    examination.add(judge_network(facts.name, condition.addresses, examination.fleet.network))


def _fit(examination: Examination, conditions: Mapping[str, Condition]) -> list[str]:
    """The machines that nothing is red on, in order."""
    return [name for name in conditions if name not in examination.red]


def _check_clock(clock: Deadline, doing: str) -> None:
    if clock.has_passed:
        raise DeadlineError(doing)
