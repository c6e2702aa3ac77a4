"""Sends files to machines: for a run, or worker, model and trees of the user before it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import load_job
from csdctl.notify import Say
from csdctl.runs.ledger import record_traffic
from csdctl.shipping import deliver as delivery
from csdctl.shipping.deliver import Delivery, deliver, pack_payload
from csdctl.shipping.store import StoredFile
from csdctl.transport.many import Outcome, run_on_all, run_on_nodes, values_or_raise
from csdctl.transport.session import Session
from csdctl.workflows.data.files import prepare_code
from csdctl.workflows.workspace.event_stream import EventStream, FilesSent


def deploy_files(
    files: Mapping[str, Sequence[StoredFile]],
    fleet: Fleet,
    sessions: Mapping[str, Session],
    events: EventStream,
) -> dict[str, Delivery]:
    """Send each machine its files, in parallel. Raises PartialError naming the machines that failed."""

    def on_done(outcome: Outcome[Delivery]) -> None:
        if outcome.value:
            events.emit(FilesSent(outcome.name, outcome.value))

    def send(session: Session) -> Delivery:
        payload = pack_payload(files[session.name])
        return deliver(session, payload, python=fleet.python_of(session.name))

    targets = {name: sessions[name] for name in files if name != HOST_NAME}
    return values_or_raise(run_on_all(targets, send, on_done=on_done), "deploying")


def deploy(
    job: Path,
    fleet: Fleet,
    directory: Path,
    say: Say,
    *,
    trees: Sequence[str] = (),
    ignored: Sequence[str] = delivery.DEFAULT_IGNORED,
    is_dry_run: bool = False,
    on_tree: Callable[[delivery.TreeRequest, delivery.FileTree], None],
    on_progress: delivery.OnDeliveryProgress,
    on_done: Callable[[Outcome[Delivery]], None],
) -> dict[str, Outcome[Delivery]]:
    """Deploy the files of `job`, or `trees` instead, each SOURCE[:DESTINATION], to every node of `fleet`.

    `ignored` are patterns of files that are excluded from trees. `on_tree` gets each tree that was read. A
    node that fails is in the result, not raised. Raises InputError when the job, or a tree, cannot be read.
    """
    if trees:
        packed = []
        for tree in map(delivery.parse_tree, trees):
            packed.append(delivery.read_tree(tree, ignored))
            on_tree(tree, packed[-1])
        payload = pack_payload(trees=packed)
    elif job.is_dir():
        raise InputError(f"{job} is a directory, expected a job file", remedy=f"copy it with --tree {job}")
    else:
        worker, model = prepare_code(load_job(job), directory, say)
        payload = pack_payload([worker, *model.files])

    def send(session: Session) -> Delivery:
        python = fleet.python_of(session.name)
        return deliver(session, payload, python=python, dry_run=is_dry_run, on_progress=on_progress)

    on_traffic = record_traffic(directory, "deploy")
    return run_on_nodes(fleet, send, directory=directory, on_done=on_done, on_traffic=on_traffic)
