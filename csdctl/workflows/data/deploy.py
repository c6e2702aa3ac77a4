"""Send trees, worker, model and public shards to the machines that lack them.

Private data is never read here. The public shard of a node is cut on the host and sent as two .npy files; the
host reads its own shard in place.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.documents import check_values, load_json, save_json, write_atomically
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job, load_job
from csdctl.notify import Say
from csdctl.placement.equation1 import Placed
from csdctl.runs.directory import ProjectDirectory
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
from csdctl.shipping.store import StoredFile, hash_file, stored_as
from csdctl.transport.many import Outcome, run_on_all, run_on_nodes, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Session
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.run_spec import DatasetSlice
from csdctl.workflows.data.model import prepare_code
from csdctl.workflows.data.prepare import Prepared

OnDelivery = Callable[[str, Delivery], None]


def deploy_files(
    files: Mapping[str, Sequence[StoredFile]],
    fleet: Fleet,
    sessions: Mapping[str, Session],
    on_delivery: OnDelivery,
) -> dict[str, Delivery]:
    """Send each machine its files, in parallel; raises PartialError naming the machines that failed."""

    def on_done(outcome: Outcome[Delivery]) -> None:
        if outcome.value:
            on_delivery(outcome.name, outcome.value)

    def send(session: Session) -> Delivery:
        payload = pack_payload(files[session.name])
        return deliver(session, payload, python=fleet.python_of(session.name))

    targets = {name: sessions[name] for name in files if name != HOST_NAME}
    return values_or_raise(run_on_all(targets, send, on_done=on_done), "deploying")


def common_files(prepared: Prepared) -> list[StoredFile]:
    """Return the files that every machine needs to train or measure."""
    return [prepared.worker, *prepared.model.files]


def cut_shards(
    placed: Sequence[Placed], public: DatasetInfo, job: Job, project: ProjectDirectory
) -> dict[str, tuple[StoredFile, StoredFile]]:
    """Return samples and labels of each node's public shard, cut from the host's data.

    A node with private data needs no empty shard to determine the shape of a sample; a node that can read all
    public data needs no shard at all.
    """
    if job.is_everywhere:
        return {}
    checked: list[str] = []
    return {
        shard.name: _cut(shard, public, job.recipe.seed, project, checked)
        for shard in placed
        if shard.name != HOST_NAME and (shard.num_public or not shard.num_private)
    }


def whole(data: DatasetInfo) -> DatasetSlice:
    """Return a slice with all rows of a prepared data set."""
    images, labels = _arrays(data)
    return DatasetSlice(images, labels, images_sha256=data.images_sha256, labels_sha256=data.labels_sha256)


def _arrays(data: DatasetInfo) -> tuple[str, str]:
    return f"{data.path}/images.npy", f"{data.path}/labels.npy"


def _cut(
    shard: Placed, public: DatasetInfo, seed: int, project: ProjectDirectory, checked: list[str]
) -> tuple[StoredFile, StoredFile]:
    """Return samples and labels of `shard`, which are kept with their hashes for the next run.

    Raises InputError if the public data was changed. Files in `checked` have been compared with their hashes.
    """
    content = hashlib.sha256(f"{public.images_sha256}{public.labels_sha256}".encode())
    name = f"{content.hexdigest()[:32]}-{seed}-{shard.public_start}-{shard.public_stop}"
    targets = [project.shards / f"{name}.{part}.npy" for part in ("images", "labels")]
    record = project.shards / f"{name}.json"
    hashes = _load_hashes(record)
    if len(hashes) != 2 or hashes != [hash_file(target) for target in targets if target.is_file()]:
        import numpy as np

        # The same rows as for a slice start … stop on the host: worker.data.rows_of.
        permutation = np.random.default_rng(seed).permutation(public.num_samples)
        rows = np.sort(permutation[shard.public_start : shard.public_stop])
        expected = (public.images_sha256, public.labels_sha256)
        for source, sha256, target in zip(_arrays(public), expected, targets, strict=True):
            path = project.root / source
            if source not in checked:
                found = hash_file(path) if path.is_file() else "no file"
                if found != sha256:
                    raise InputError(
                        f"{source} is not what was prepared: expected SHA-256 {sha256}, found {found}",
                        remedy="run `csdctl prepare`",
                    )
                checked.append(source)
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if len(array) != public.num_samples:
                raise InputError(
                    f"{source} has {len(array)} rows, expected {public.num_samples}",
                    remedy="run `csdctl prepare`",
                )
            with write_atomically(target) as file:
                np.save(file, array[rows])
        hashes = [hash_file(target) for target in targets]
        save_json(record, hashes)
    images, labels = (
        stored_as(f"{sha256}.npy", target, TrafficClass.PUBLIC)
        for sha256, target in zip(hashes, targets, strict=True)
    )
    return images, labels


def _load_hashes(record: Path) -> list[str]:
    """Return the hashes of shards that were cut before; none if they are missing or damaged."""
    try:
        return check_values(load_json(record), list[str], str(record))
    except InputError:
        return []


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
