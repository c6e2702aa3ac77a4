"""Send trees, worker, model and public shards to the machines that lack them.

Private data is never read here. The public shard of a node is cut on the host and sent as two .npy files; the
host reads its own shard in place.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from csdctl.documents import write_atomically
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.placement.equation1 import Placed
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import record_traffic
from csdctl.shipping.chunks import SharedChunks
from csdctl.shipping.deliver import Delivery, OnDeliveryProgress, deliver
from csdctl.shipping.parcel import Parcel, pack_parcel
from csdctl.shipping.store import StoredFile, hash_file
from csdctl.shipping.tree import DEFAULT_IGNORED, TreeRequest, read_tree
from csdctl.transport.many import Outcome, run_on_all, run_on_nodes, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Session
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.run_spec import DatasetSlice
from csdctl.workflows.data.prepare import Prepared

OnDelivery = Callable[[str, Delivery], None]


def deploy_files(
    files: Mapping[str, Sequence[StoredFile]],
    fleet: Fleet,
    sessions: Mapping[str, Session],
    on_delivery: OnDelivery,
) -> dict[str, Delivery]:
    """Send each machine its files, in parallel; raises PartialError naming the machines that failed."""
    chunks = SharedChunks()

    def on_done(outcome: Outcome[Delivery]) -> None:
        if outcome.value:
            on_delivery(outcome.name, outcome.value)

    def send(session: Session) -> Delivery:
        parcel = pack_parcel([file.as_object() for file in files[session.name]])
        return deliver(session, parcel, chunks, python=fleet.python_of(session.name))

    targets = {name: sessions[name] for name in files if name != HOST_NAME}
    return values_or_raise(run_on_all(targets, send, on_done=on_done), "deploying")


def pack_trees(
    requests: Sequence[TreeRequest], chunks: SharedChunks, ignored: Sequence[str] = DEFAULT_IGNORED
) -> Parcel:
    """Read the trees of `requests` from the host's disk; raises InputError for undeployable entries."""
    return pack_parcel(trees=[read_tree(request, chunks, ignored) for request in requests])


def deploy_parcel(
    parcel: Parcel,
    chunks: SharedChunks,
    fleet: Fleet,
    *,
    directory: Path,
    dry_run: bool = False,
    on_progress: OnDeliveryProgress = lambda progress: None,
    on_done: Callable[[Outcome[Delivery]], None] = lambda outcome: None,
) -> dict[str, Outcome[Delivery]]:
    """Send `parcel` to every node of `fleet`; a failure is an outcome and does not stop the others."""

    def send(session: Session) -> Delivery:
        python = fleet.node(session.name).python
        return deliver(session, parcel, chunks, python=python, dry_run=dry_run, on_progress=on_progress)

    on_traffic = record_traffic(directory, "deploy")
    return run_on_nodes(fleet, send, directory=directory, on_done=on_done, on_traffic=on_traffic)


def common_files(prepared: Prepared) -> list[StoredFile]:
    """Return the files that every machine needs to train or measure."""
    return [prepared.worker, prepared.model.architecture, prepared.model.weights]


def cut_shards(
    placed: Sequence[Placed], public: DatasetInfo, job: Job, project: ProjectDirectory
) -> dict[str, tuple[StoredFile, StoredFile]]:
    """Return samples and labels of each node's public shard, cut from the host's data.

    A node with private data needs no empty shard to determine the shape of a sample; a node that can read all
    public data needs no shard at all.
    """
    if job.is_everywhere:
        return {}
    seed = job.recipe.seed
    return {
        shard.name: _cut(shard, public, seed, project)
        for shard in placed
        if shard.name != HOST_NAME and (shard.num_public or not shard.num_private)
    }


def whole(data: DatasetInfo) -> DatasetSlice:
    """Return a slice with all rows of a prepared data set."""
    return DatasetSlice(*_arrays(data))


def _arrays(data: DatasetInfo) -> tuple[str, str]:
    return f"{data.path}/images.npy", f"{data.path}/labels.npy"


def _cut(
    shard: Placed, public: DatasetInfo, seed: int, project: ProjectDirectory
) -> tuple[StoredFile, StoredFile]:
    import numpy as np

    name = f"{public.fingerprint}-{seed}-{shard.public_start}-{shard.public_stop}"
    targets = [project.shards / f"{name}.{part}.npy" for part in ("images", "labels")]
    if not all(target.exists() for target in targets):
        # The same rows as for a slice start … stop on the host: worker.data.rows_of.
        permutation = np.random.default_rng(seed).permutation(public.num_samples)
        rows = np.sort(permutation[shard.public_start : shard.public_stop])
        for source, target in zip(_arrays(public), targets, strict=True):
            array = np.load(project.root / source, mmap_mode="r", allow_pickle=False)
            with write_atomically(target) as file:
                np.save(file, array[rows])
    images, labels = (
        StoredFile(hash_file(target), ".npy", target, TrafficClass.PUBLIC) for target in targets
    )
    return images, labels
