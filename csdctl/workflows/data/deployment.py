"""`deploy`: a job's files, or directory trees of the host, to every node of a fleet."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.fleet.model import Fleet
from csdctl.job.model import load_job
from csdctl.notify import Say
from csdctl.runs.ledger import record_traffic
from csdctl.shipping.deliver import Delivery, DeliveryProgress, deliver
from csdctl.shipping.payload import (
    DEFAULT_IGNORED,
    FileTree,
    TreeRequest,
    pack_payload,
    parse_tree,
    read_tree,
)
from csdctl.transport.many import Outcome, run_on_nodes
from csdctl.transport.session import Session
from csdctl.workflows.data.model import prepare_code


@dataclass(frozen=True)
class DeployRequest:
    """Request to deploy the files of `job`, or `trees` instead, each as SOURCE[:DESTINATION]."""

    job: Path
    trees: Sequence[str] = ()
    ignored: Sequence[str] = ()
    """Patterns of files that are excluded from trees."""
    is_everything: bool = False
    """Whether trees include what is excluded by default: .git, __pycache__ and .csdctl."""
    is_dry_run: bool = False


class DeployObserver(Protocol):
    """Follows one deployment; called from any thread."""

    def packed(self, request: TreeRequest, tree: FileTree) -> None:
        """A tree was read from the host's disk."""

    def advance(self, progress: DeliveryProgress) -> None:
        """More bytes were sent to a node."""

    def finish(self, outcome: Outcome[Delivery]) -> None:
        """A node has received everything, or failed."""


def deploy_request(
    request: DeployRequest, fleet: Fleet, *, directory: Path, say: Say, observer: DeployObserver
) -> dict[str, Outcome[Delivery]]:
    """Deploy to every node of `fleet`; a node that fails is in the result, not raised.

    Raises InputError when the job, or a tree, cannot be read.
    """
    if request.trees:
        defaults = () if request.is_everything else DEFAULT_IGNORED
        packed = []
        for tree in map(parse_tree, request.trees):
            packed.append(read_tree(tree, [*request.ignored, *defaults]))
            observer.packed(tree, packed[-1])
        payload = pack_payload(trees=packed)
    else:
        job = load_job(request.job)
        worker, model = prepare_code(job, directory, say)
        payload = pack_payload([worker, *model.files])

    def send(session: Session) -> Delivery:
        python = fleet.python_of(session.name)
        dry_run = request.is_dry_run
        return deliver(session, payload, python=python, dry_run=dry_run, on_progress=observer.advance)

    on_traffic = record_traffic(directory, "deploy")
    return run_on_nodes(fleet, send, directory=directory, on_done=observer.finish, on_traffic=on_traffic)
