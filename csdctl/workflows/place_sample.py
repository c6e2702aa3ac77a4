"""Fills a job's data paths with a sample data set, for trying csdctl out.

Public and validation data go to the host's paths; the private part is written to every node's private
path, as if it had always been there. Real private data is never moved by csdctl: this is for samples.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from csdctl.documents import save_json
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.runs.directory import ProjectDirectory
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.session import Session
from csdctl.workflows.sample import Samples, SampleSplit, fetch_fashion_mnist, split_sample

RECORD = "sample.json"
SAMPLES = ("fashion-mnist",)

Say = Callable[[str], None]


def place_sample(
    name: str, job: Job, fleet: Fleet, sessions: Mapping[str, Session], project: ProjectDirectory, say: Say
) -> None:
    """Put the sample `name` where `job` says its data lies; raises InputError when other data is there."""
    if name not in SAMPLES:
        raise InputError(f"there is no sample {name!r}", remedy=f"samples: {', '.join(SAMPLES)}")
    num_private = len(fleet.nodes) if job.private_path else 0
    record = {"sample": name, "seed": job.recipe.seed, "num_private_parts": num_private}
    dataset = fetch_fashion_mnist(project.state / "samples" / name, say=say)
    split = split_sample(
        dataset,
        num_nodes=max(1, num_private),
        private_fraction=1 / 7 if num_private else 0.0,
        seed=job.recipe.seed,
    )
    _place_on_host(job.public_path, split.public, record)
    if job.validation_path:
        _place_on_host(job.validation_path, split.validation, record)
    if num_private:
        _place_on_nodes(job, fleet, sessions, split, record)
    say(
        f"sample {name}: {len(split.public):,} public samples on the host, "
        f"{sum(len(part) for part in split.private):,} private ones over {num_private} nodes"
    )


def _place_on_host(directory: Path, samples: Samples, record: dict[str, object]) -> None:
    if directory.exists() and any(directory.iterdir()):
        if _is_same(directory / RECORD, record):
            return
        raise InputError(
            f"{directory} holds other data",
            remedy="remove it, or name another path in the job's data section",
        )
    _save(directory, samples, record)


def _is_same(path: Path, record: dict[str, object]) -> bool:
    try:
        return bool(json.loads(path.read_text()) == record)
    except (OSError, ValueError):
        return False


def _save(directory: Path, samples: Samples, record: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _save_array(directory / "images.npy", samples.images)
    _save_array(directory / "labels.npy", samples.labels.astype(np.int32))
    save_json(directory / RECORD, record)


def _save_array(path: Path, array: NDArray[np.generic]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as aside:
        np.save(aside, array)
    Path(aside.name).replace(path)


def _place_on_nodes(
    job: Job, fleet: Fleet, sessions: Mapping[str, Session], split: SampleSplit, record: dict[str, object]
) -> None:
    # An upload knows no `~`: what it is given starts at the login directory.
    target = str(job.private_path).removeprefix("~/")
    parts = dict(zip((node.name for node in fleet.nodes), split.private, strict=True))

    def on_node(session: Session) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch)
            _save(local, parts[session.name], record)
            found = session.run(
                ["sh", "-c", 'cat -- "$1/sample.json" 2>/dev/null; ls -A -- "$1" 2>/dev/null', "sh", target]
            )
            if found.stdout.startswith((local / RECORD).read_bytes()):
                return
            if found.stdout.strip():
                raise InputError(
                    f"{job.private_path} holds other data", node=session.name, remedy="remove it first"
                )
            for name in ("images.npy", "labels.npy", RECORD):
                session.upload(local / name, f"{target}/{name}")

    values_or_raise(
        run_on_all({node.name: sessions[node.name] for node in fleet.nodes}, on_node), "placing the sample"
    )
