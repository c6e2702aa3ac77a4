"""The common check: a real mpirun, with the options of training, over ranks that only say hello."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from csdctl.documents import save_text
from csdctl.errors import CsdctlError, RunError
from csdctl.fleet.checks import FLEET_NAME, Check, Status, judge_error
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.launch.diagnosis import find_cause
from csdctl.launch.leftovers import end_run
from csdctl.launch.mpi_command import RankCommand, build_mpirun_command, rank_marker
from csdctl.launch.mpi_job import Deadlines, JobOutcome, MpiJob
from csdctl.launch.tools import choose_prefix, find_mpirun
from csdctl.launch.traffic import between_ranks, of_mpirun
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.ledger import Ledger
from csdctl.shipping.chunks import SharedChunks
from csdctl.shipping.deliver import Delivery, deliver
from csdctl.shipping.parcel import pack_parcel
from csdctl.shipping.store import StoredFile, store_bytes
from csdctl.shipping.worker_calls import build_worker_command
from csdctl.shipping.worker_zip import pack_worker
from csdctl.transport.many import fleet_known_hosts_paths, run_on_all
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Session
from csdctl.transport.ssh_config import build_ssh_config
from csdctl.worker.protocol.events import SUMS, CollectiveTimed, Event, MpiChecked, Started, Traffic

Tell = Callable[[Check], None]
ALONE_DEADLINE_S = 15.0
ALONE_AT_ONCE = 8
SUMS_DEADLINE_S = 120.0
TRY_PRTED = "try `prted --version` on the node by hand, and look at firewalls between node and host"
LOOK_MPI = "look at firewalls and `network:` in the fleet file"


def check_mpi(
    fleet: Fleet,
    facts: Mapping[str, Facts],
    sessions: Mapping[str, Session],
    project: ProjectDirectory,
    deadline_s: float,
    tell: Tell,
) -> None:
    """Start a rank on the host and on every node of `fleet`, sum, and tell the checks that come of it.

    `deadline_s` is for entering MPI, and once more for the sums. Nothing runs anywhere afterwards.
    """
    worker = store_bytes(pack_worker(), ".pyz", project.root, TrafficClass.CODE)
    nodes = [node.name for node in fleet.nodes]
    refused = _deliver(worker, fleet, {name: sessions[name] for name in nodes})
    for check in refused:
        tell(check)
    if refused:
        return
    machines = fleet.machines
    check, nobody_started = _greet(machines, worker, fleet, facts, sessions, project, deadline_s)
    tell(check)
    if nobody_started and len(nodes) > 1:
        # mpirun starts no rank before every daemon is there, and does not say which one is missing.
        for one in _greet_alone(worker, fleet, facts, sessions, project, min(deadline_s, ALONE_DEADLINE_S)):
            tell(one)


def measure_sums(
    fleet: Fleet,
    facts: Mapping[str, Facts],
    sessions: Mapping[str, Session],
    project: ProjectDirectory,
    wanted: Sequence[tuple[int, int]],
) -> list[CollectiveTimed]:
    """Time sums over (the first so many ranks, so many bytes each); the host is the first rank.

    Raises what ends them; the worker has been delivered before.
    """
    worker = store_bytes(pack_worker(), ".pyz", project.root, TrafficClass.CODE)
    machines = fleet.machines
    hello = project.new_scratch()
    events: list[Event] = []
    sums = ",".join(f"{num_ranks}:{num_bytes}" for num_ranks, num_bytes in wanted)
    command = _command(hello, machines, worker, fleet, facts, project, [f"--sums={sums}"])
    opened = {name: sessions[name] for name in machines}
    outcome = _run(command, hello, fleet, project, opened, SUMS_DEADLINE_S, events, "tune")
    check = judge_mpi_check(machines, events, outcome, SUMS_DEADLINE_S, hello.logs)
    if check.status != Status.OK:
        raise RunError(f"sums over the ranks could not be measured: {check.found}", remedy=check.remedy)
    shutil.rmtree(hello.path, ignore_errors=True)
    return [event for event in events if isinstance(event, CollectiveTimed)]


def _greet_alone(
    worker: StoredFile,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    sessions: Mapping[str, Session],
    project: ProjectDirectory,
    deadline_s: float,
) -> list[Check]:
    """A red check for every node that does not even say hello when it is alone."""

    def alone(name: str) -> Check:
        check, _ = _greet((name,), worker, fleet, facts, sessions, project, deadline_s)
        return replace(check, machine=name, found=f"alone: {check.found}")

    names = {node.name: node.name for node in fleet.nodes}
    outcomes = run_on_all(names, alone, max_workers=ALONE_AT_ONCE)
    return [one.value for one in outcomes.values() if one.value and one.value.status != Status.OK]


def _greet(
    machines: Sequence[str],
    worker: StoredFile,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    sessions: Mapping[str, Session],
    project: ProjectDirectory,
    deadline_s: float,
) -> tuple[Check, bool]:
    """One mpirun over `machines`: what it came to, and whether no rank at all was started."""
    hello = project.new_scratch()
    events: list[Event] = []
    try:
        command = _command(hello, machines, worker, fleet, facts, project)
        outcome = _run(
            command,
            hello,
            fleet,
            project,
            {name: sessions[name] for name in machines},
            deadline_s,
            events,
            "doctor",
        )
    except CsdctlError as error:
        return judge_error(FLEET_NAME, "mpi", error), False
    check = judge_mpi_check(machines, events, outcome, deadline_s, hello.logs)
    if check.status == Status.OK:
        shutil.rmtree(hello.path, ignore_errors=True)
    return check, not events


def _deliver(worker: StoredFile, fleet: Fleet, sessions: Mapping[str, Session]) -> list[Check]:
    parcel, chunks = pack_parcel([worker.as_object()]), SharedChunks()

    def send(session: Session) -> Delivery:
        return deliver(session, parcel, chunks, python=fleet.python_of(session.name))

    outcomes = run_on_all(sessions, send)
    return [judge_error(name, "deploy", one.error) for name, one in outcomes.items() if one.error]


def _command(
    hello: RunDirectory,
    machines: Sequence[str],
    worker: StoredFile,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    project: ProjectDirectory,
    more: Sequence[str] = (),
) -> list[str]:
    nodes = [name for name in machines if name != HOST_NAME]
    config = hello.path / "ssh_config"
    save_text(config, build_ssh_config(fleet.nodes, fleet_known_hosts_paths(fleet, project.root)))
    commands = []
    for rank, name in enumerate(machines):
        arguments = ["mpi-check", "--rank", str(rank), "--size", str(len(machines)), "--node", name]
        arguments += [*more, "--marker", rank_marker(hello.run_id, name)]
        python = fleet.python_of(name)
        commands.append(RankCommand(name, tuple(build_worker_command(python, worker.path, arguments))))
    return build_mpirun_command(
        find_mpirun(),
        choose_prefix(nodes, facts),
        config.relative_to(project.root),
        fleet.network,
        commands,
        run_id=hello.run_id,
    )


def _run(
    command: Sequence[str],
    hello: RunDirectory,
    fleet: Fleet,
    project: ProjectDirectory,
    sessions: Mapping[str, Session],
    deadline_s: float,
    events: list[Event],
    doing: str,
) -> JobOutcome:
    """Run it to its end, keep its `events`, and leave nothing running on any machine."""

    def log_path(rank: int | None) -> Path:
        return hello.mpirun_log if rank is None else hello.rank_log(rank)

    job = MpiJob(command, len(sessions), log_path, project.root, os.environ)
    try:
        outcome = job.run(events.append, Deadlines(start_s=deadline_s, silence_s=deadline_s))
        _note(events, outcome, list(sessions), fleet, project, doing)
        return outcome
    finally:
        end_run(hello.run_id, sessions, {name: fleet.python_of(name) for name in sessions})


def _note(
    events: Sequence[Event],
    outcome: JobOutcome,
    machines: Sequence[str],
    fleet: Fleet,
    project: ProjectDirectory,
    doing: str,
) -> None:
    ledger = Ledger(project.ledger, doing)
    traffic = [event for event in events if isinstance(event, Traffic)]
    ledger.add(between_ranks(traffic, machines, {SUMS: TrafficClass.CONTROL}))
    ledger.add(of_mpirun([outcome], fleet))
    ledger.save()


def judge_mpi_check(
    machines: Sequence[str], events: Sequence[Event], outcome: JobOutcome, deadline_s: float, logs: Path
) -> Check:
    """What the hello came to; `machines` in order of rank."""
    greeted = [event for event in events if isinstance(event, MpiChecked)]
    if len(outcome.finished) == len(machines):
        return _judge_greetings(greeted)
    expected = f"a hello from {len(machines)} machines within {deadline_s:g} s"
    found, remedy = _why_not(machines, events, outcome, deadline_s)
    remedy = f"{remedy}; logs: {logs}"
    return Check(FLEET_NAME, "mpi", Status.FAIL, found, expected, remedy)


def _judge_greetings(greeted: Sequence[MpiChecked]) -> Check:
    libraries = {event.mpi_library for event in greeted}
    if len(libraries) > 1:
        found = "; ".join(f"{event.node} uses {event.mpi_library}" for event in greeted)
        remedy = "install one version of openmpi everywhere"
        return Check(FLEET_NAME, "mpi", Status.FAIL, found, "one MPI on all machines", remedy)
    slowest_s = max(event.sum_s for event in greeted)
    size = greeted[0].vector_bytes >> 20
    found = f"{len(greeted)} ranks, {libraries.pop()}, a sum of {size} MiB in {slowest_s * 1000:.1f} ms"
    return Check(FLEET_NAME, "mpi", Status.OK, found)


def _why_not(
    machines: Sequence[str], events: Sequence[Event], outcome: JobOutcome, deadline_s: float
) -> tuple[str, str]:
    """What went wrong, and what to do."""
    if outcome.failed:
        first = next(iter(outcome.failed.values()))
        return f"{first.node}: {first.message}", first.remedy
    started = {event.node for event in events if isinstance(event, Started)}
    silent = [name for name in machines if name not in started]
    if outcome.overdue and not started:
        found = (
            f"not one rank was started within {deadline_s:g} s: the MPI daemon (prted) of a node is missing"
        )
        return found, TRY_PRTED
    if outcome.overdue and silent:
        found = f"{', '.join(silent)} never started a rank within {deadline_s:g} s"
        return found, TRY_PRTED
    stuck = [name for rank, name in enumerate(machines) if rank not in outcome.ready]
    if outcome.overdue == "start":
        found = f"{', '.join(stuck)} started, and did not come through MPI_Init within {deadline_s:g} s"
        return found, LOOK_MPI
    if outcome.overdue:
        return f"all entered MPI, and their sum hung for {deadline_s:g} s", LOOK_MPI
    cause = find_cause(outcome.last_words, list(outcome.exited.values()), machines)
    where = f"{cause.node}: " if cause.node else ""
    unheard = f" ({', '.join(silent)} never said hello)" if silent else ""
    return f"{where}{cause.message}{unheard}", LOOK_MPI
