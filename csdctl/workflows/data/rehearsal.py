"""`prepare --dry-run`: which data would be read, where, and whether it is there; no machine is written to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import InputError, NodeError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.transport.commands import build_program_command
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.session import Session, bounded
from csdctl.workflows.data.prepared_record import load_prepared
from csdctl.workflows.workspace.workspace import open_workspace

READABLE = ("directory", "file")
ABSENT = ("empty", "missing", "unreadable")
_DOING = "looking for data"


@dataclass(frozen=True)
class DataSource:
    """A data set of the job on one machine."""

    data: str
    """public, validation or private."""
    machine: str
    path: str
    found: str
    """One of READABLE or ABSENT."""


@dataclass(frozen=True)
class Rehearsal:
    """The data that `prepare` would read."""

    sources: tuple[DataSource, ...]
    num_samples: int | None = None
    """When the job was last prepared; None: it never was."""

    def check(self) -> None:
        """Raise InputError for data that is not there."""
        absent = [source for source in self.sources if source.found in ABSENT]
        if absent:
            raise InputError(
                "; ".join(f"{one.machine}: data at {one.path} is {one.found}" for one in absent),
                remedy="correct the paths of the job's data section, or store the data there",
                node=absent[0].machine if len(absent) == 1 and absent[0].machine != HOST_NAME else "",
            )


def rehearse_preparation(job: Job, fleet: Fleet, *, directory: Path) -> Rehearsal:
    """Return what `prepare_fleet` would read; raises CsdctlError when a machine cannot be asked."""
    with open_workspace(directory, fleet, "prepare") as space:
        wanted = _list_paths(job, space.fleet)
        sessions = {name: space.sessions[name] for name in wanted}

        def ask(session: Session) -> list[DataSource]:
            python = space.fleet.python_of(session.name)
            return [
                DataSource(data, session.name, path, _look(session, python, path))
                for data, path in wanted[session.name]
            ]

        found = values_or_raise(run_on_all(sessions, ask), _DOING)
        recorded = load_prepared(space.project, job)
    sources = tuple(source for of_machine in found.values() for source in of_machine)
    return Rehearsal(sources, recorded.num_samples if recorded else None)


def _list_paths(job: Job, fleet: Fleet) -> dict[str, Sequence[tuple[str, str]]]:
    of_host = [("public", str(job.public_path))]
    if job.validation_path:
        of_host.append(("validation", str(job.validation_path)))
    wanted: dict[str, Sequence[tuple[str, str]]] = {HOST_NAME: of_host}
    if job.private_path:
        wanted |= {node.name: [("private", job.private_path)] for node in fleet.nodes}
    return wanted


def _look(session: Session, python: str, path: str) -> str:
    done = session.run(build_program_command(python, "present", [path])).check(session.name, doing=_DOING)
    found = done.output.strip()
    if found not in (*READABLE, *ABSENT):
        raise NodeError(f"{_DOING}: received {bounded(found)!r}, expected a word", node=session.name)
    return found
