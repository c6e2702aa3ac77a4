"""Check that the machines have what the job's own code imports, before it is sent and run there."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.facts.software import find_missing
from csdctl.fleet.model import Fleet
from csdctl.job.imports import JobImports, Needed, describe_missing, list_imports, remedy_of
from csdctl.job.model import Job, load_job
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.session import Session
from csdctl.workflows.data.model import SerializedModel, find_built

DEFAULT_JOB = Path("job.yaml")


def read_imports(path: Path | None, directory: Path) -> JobImports | None:
    """Return what the job at `path` imports; None: job.yaml in `directory`, if there is one.

    Raises InputError if the job that is named cannot be read.
    """
    try:
        if path is None and not (directory / DEFAULT_JOB).is_file():
            return None
        job = load_job(path or directory / DEFAULT_JOB)
    except InputError as error:
        if path:
            raise
        return JobImports(problem=error.message)
    info = find_built(job, directory)
    return list_imports(job, info.needs_code if info else None)


def check_nodes(job: Job, model: SerializedModel, fleet: Fleet, sessions: Mapping[str, Session]) -> None:
    """Raise InputError, for all nodes that lack a module which the code imports that they get."""
    needed = list_imports(job, model.info.needs_code).nodes
    nodes = {node.name: sessions[node.name] for node in fleet.nodes}
    doing = "looking for what the job's code imports"
    values_or_raise(run_on_all(nodes, lambda session: check_machine(session, fleet, needed)), doing)


def check_machine(session: Session, fleet: Fleet, needed: Sequence[Needed]) -> None:
    """Raise InputError if the machine lacks one of the modules `needed`."""
    if not needed:
        return
    python = fleet.python_of(session.name)
    missing = find_missing(session, python, [need.module for need in needed])
    if missing:
        lacking = [need for need in needed if need.module in missing]
        raise InputError(describe_missing(lacking), node=session.name, remedy=remedy_of(lacking, python))
