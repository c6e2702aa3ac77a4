"""mpirun for a run: which machines can confine MPI, and what is said where one cannot."""

from collections.abc import Mapping, Sequence

from csdctl.fleet.checks import Check, Status
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import Fleet
from csdctl.launch.mpirun import Mpirun
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.shipping.worker_calls import build_worker_command, run_worker
from csdctl.transport.many import run_on_all
from csdctl.transport.session import Session
from csdctl.worker.protocol.sandbox import SandboxCheck

CHECK_DEADLINE_S = 30.0


def prepare_mpirun(
    fleet: Fleet,
    facts: Mapping[str, Facts],
    project: ProjectDirectory,
    run: RunDirectory,
    sessions: Mapping[str, Session],
    worker_path: str,
    obstacles: Mapping[str, str],
) -> Mpirun:
    """Return mpirun for ranks on the machines of `sessions`; `obstacles` as found by `find_obstacles`."""

    def build_command(machine: str, arguments: Sequence[str]) -> list[str]:
        return build_worker_command(fleet.python_of(machine), worker_path, arguments)

    return Mpirun(fleet, facts, run, project.root, sessions, worker_path, build_command, obstacles)


def find_obstacles(fleet: Fleet, sessions: Mapping[str, Session], worker_path: str) -> dict[str, str]:
    """Return the machines of `sessions` that cannot run MPI in a sandbox, and why.

    The worker must have been delivered to them.
    """

    def check(session: Session) -> SandboxCheck:
        return run_worker(
            session,
            fleet.python_of(session.name),
            worker_path,
            ["sandbox-check"],
            SandboxCheck,
            doing="checking the sandbox",
            deadline_s=CHECK_DEADLINE_S,
        )

    outcomes = run_on_all(sessions, check)
    found = {
        name: str(outcome.error) if outcome.value is None else outcome.value.obstacle
        for name, outcome in outcomes.items()
    }
    return {name: obstacle for name, obstacle in found.items() if obstacle}


def judge_sandbox(machine: str, obstacle: str) -> Check:
    """Return the check of one machine: a warning when it cannot run a sandbox."""
    if not obstacle:
        return Check(machine, "sandbox", Status.OK, "MPI is confined")
    remedy = "see what that means in docs/explanation/security.md: trust every node, or leave it out"
    return Check(machine, "sandbox", Status.WARN, obstacle, "MPI in a sandbox", remedy)
