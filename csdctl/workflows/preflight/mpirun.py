"""mpirun for a run: which machines can confine MPI, and what is said where one cannot."""

from collections.abc import Mapping, Sequence

from csdctl.fleet.checks import FLEET_NAME, Check, Status
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import Fleet
from csdctl.launch.mpirun import Mpirun, list_peers
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.shipping.worker_calls import build_worker_command, call_worker
from csdctl.transport.many import run_on_all
from csdctl.transport.program import within
from csdctl.transport.session import Session
from csdctl.worker.protocol.sandbox import SandboxCheck, SandboxRequest

CHECK_DEADLINE_S = 30.0


def prepare_mpirun(
    fleet: Fleet,
    facts: Mapping[str, Facts],
    project: ProjectDirectory,
    run: RunDirectory,
    sessions: Mapping[str, Session],
    worker_path: str,
    obstacles: Mapping[str, str],
    link_key: str = "",
) -> Mpirun:
    """Return mpirun for ranks on the machines of `sessions`; `obstacles` as found by `find_obstacles`."""

    def build_command(machine: str, arguments: Sequence[str]) -> list[str]:
        return build_worker_command(fleet.python_of(machine), worker_path, arguments)

    return Mpirun(fleet, facts, run, project.root, sessions, worker_path, build_command, obstacles, link_key)


def find_obstacles(fleet: Fleet, sessions: Mapping[str, Session], worker_path: str) -> dict[str, str]:
    """Return the machines of `sessions` that cannot run MPI in a sandbox, and why.

    The worker must have been delivered to them.
    """
    checks = check_sandboxes(fleet, sessions, worker_path)
    return {name: check.obstacle for name, check in checks.items() if check.obstacle}


def check_sandboxes(
    fleet: Fleet, sessions: Mapping[str, Session], worker_path: str
) -> dict[str, SandboxCheck]:
    """Return what each machine of `sessions` can do for a sandbox; the worker must have been delivered."""
    request = SandboxRequest(tuple(list_peers(fleet)))

    def check(session: Session) -> SandboxCheck:
        return call_worker(
            session,
            fleet.python_of(session.name),
            worker_path,
            "sandbox-check",
            request,
            SandboxCheck,
            doing="checking the sandbox",
            patience=within(CHECK_DEADLINE_S),
        )

    outcomes = run_on_all(sessions, check)
    return {name: outcome.value or SandboxCheck(str(outcome.error)) for name, outcome in outcomes.items()}


def judge_sandbox(machine: str, check: SandboxCheck) -> Check:
    """Return the check of one machine: a warning when it cannot run a sandbox."""
    if not check.obstacle:
        return Check(machine, "sandbox", Status.OK, "MPI is confined")
    remedy = (
        "trust every node, or leave the machine out: with it, a run takes the connections of anybody who "
        "reaches its ports, which are open at all addresses there (docs/explanation/security.md)"
    )
    return Check(machine, "sandbox", Status.WARN, check.obstacle, "MPI in a sandbox", remedy)


def judge_listeners(fleet: Fleet, checks: Mapping[str, SandboxCheck]) -> list[Check]:
    """Return a warning for each machine, or for the fleet, whose MPI listens outside of `network:` too."""
    expected = "MPI's ports closed outside of `network:`"
    if not fleet.network:
        found = "no `network:`: MPI's ports answer at all addresses, and a token alone keeps strangers out"
        remedy = "set `network:` in the fleet file to the network that all machines share"
        return [Check(FLEET_NAME, "listeners", Status.WARN, found, expected, remedy)]
    remedy = (
        "set `network:` to one that has a single address of the machine, or close other ways by a firewall"
    )
    return [
        Check(name, "listeners", Status.WARN, check.why_open, expected, remedy)
        for name, check in checks.items()
        if check.why_open and not fleet.emulated
    ]
