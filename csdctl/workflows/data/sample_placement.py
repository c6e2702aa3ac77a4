"""Fill a job's data paths with a sample data set, to try csdctl.

Public and validation data go to the host's paths; the private part is written to the private path of every
node. csdctl never moves real private data: this is for sample data only.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from csdctl.documents import load_json, save_json
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.deliver import deliver
from csdctl.shipping.payload import TreeRequest, pack_payload, read_tree
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.session import Session
from csdctl.workflows.data.sample_clipart import fetch_clipart, split_clipart
from csdctl.workflows.data.sample_dataset import fetch_fashion_mnist, split_sample
from csdctl.workflows.data.sample_parts import SamplePart, SampleSplit

RECORD = ".sample.json"
"""A name that `prepare` passes over."""
FASHION_MNIST, CLIPART = "fashion-mnist", "openclipart"
SAMPLES = (FASHION_MNIST, CLIPART)
PRIVATE_FRACTION = 1 / 7
"""Of the samples that are trained on."""


def place_sample(
    name: str, job: Job, fleet: Fleet, sessions: Mapping[str, Session], project: ProjectDirectory, say: Say
) -> None:
    """Write sample data set `name` to the data paths of `job`; raises InputError for other data there."""
    check_sample(name)
    num_private = len(fleet.nodes) if job.private_path else 0
    record = {"sample": name, "seed": job.recipe.seed, "num_private_parts": num_private}
    split = _fetch(name, cache_of(name, project), max(1, num_private), bool(num_private), job, say)
    _place_on_host(job.public_path, split.public, record)
    if job.validation_path:
        _place_on_host(job.validation_path, split.validation, record)
    if num_private:
        _place_on_nodes(job, fleet, sessions, split, record)
    say(
        f"sample {name}: {len(split.public):,} public samples on the host, "
        f"{sum(len(part) for part in split.private):,} private samples on {num_private} nodes"
    )


def check_sample(name: str) -> None:
    """Raise InputError unless there is a sample data set of this name."""
    if name not in SAMPLES:
        raise InputError(f"unknown sample data set {name!r}", remedy=f"available: {', '.join(SAMPLES)}")


def cache_of(name: str, project: ProjectDirectory) -> Path:
    """Return the directory of the files of a sample that was fetched."""
    return project.state / "samples" / name


def _fetch(name: str, cache: Path, num_nodes: int, is_private: bool, job: Job, say: Say) -> SampleSplit:
    fraction, seed = PRIVATE_FRACTION if is_private else 0.0, job.recipe.seed
    if name == CLIPART:
        pictures = fetch_clipart(cache, say=say)
        return split_clipart(pictures, num_nodes=num_nodes, private_fraction=fraction, seed=seed)
    dataset = fetch_fashion_mnist(cache, say=say)
    return split_sample(dataset, num_nodes=num_nodes, private_fraction=fraction, seed=seed)


def _place_on_host(directory: Path, samples: SamplePart, record: dict[str, object]) -> None:
    is_ours = _is_same(directory / RECORD, record)
    if is_ours and all((directory / name).exists() for name in samples.names()):
        return
    if not is_ours and directory.exists() and any(directory.iterdir()):
        raise InputError(
            f"{directory} contains other data",
            remedy="remove it, or set another path in the job's data section",
        )
    _save(directory, samples, record)


def _is_same(path: Path, record: dict[str, object]) -> bool:
    try:
        return bool(load_json(path) == record)
    except InputError:
        return False


def _save(directory: Path, samples: SamplePart, record: dict[str, object]) -> None:
    """Write the record first, so that an interrupted call is recognized and completed later."""
    save_json(directory / RECORD, record)
    samples.save(directory)


def _place_on_nodes(
    job: Job, fleet: Fleet, sessions: Mapping[str, Session], split: SampleSplit, record: dict[str, object]
) -> None:
    """Deploy each node's part as a tree: atomically, and never over data that is not from a sample."""
    parts = dict(zip((node.name for node in fleet.nodes), split.private, strict=True))
    # Destinations are relative to the login directory; `~` is not expanded.
    target = str(job.private_path).removeprefix("~/")

    def on_node(session: Session) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            _save(Path(scratch), parts[session.name], record)
            tree = read_tree(TreeRequest(Path(scratch), target), ignored=())
            deliver(session, pack_payload(trees=[tree]), python=fleet.python_of(session.name))

    values_or_raise(
        run_on_all({node.name: sessions[node.name] for node in fleet.nodes}, on_node), "writing sample data"
    )
