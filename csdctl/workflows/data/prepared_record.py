"""A record of a job's prepared data, to be read without contacting a machine.

Prepared data is stored under the hash of its content, private data on the nodes: neither can be found from
job.yaml without reading the sources again. Therefore `prepare_job` saves a record with counts and shapes, but
no samples and no file names.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from csdctl.documents import check_values, load_json, save_text
from csdctl.errors import InputError
from csdctl.job.model import Job
from csdctl.runs.directory import ProjectDirectory
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import to_json


@dataclass(frozen=True)
class PreparedData:
    """The prepared data of one job."""

    key: str
    """Hash of the job's data section; the data itself may have changed since."""
    public: DatasetInfo
    """Without class names."""
    num_private: dict[str, int] = field(default_factory=dict)
    """Private samples by node."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests by 'public', 'validation' or node: the fingerprint of its data, and a hash of the description
    that was received when the data was prepared, with the hashes of its files."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.public.num_samples + sum(self.num_private.values())


def save_prepared(
    project: ProjectDirectory,
    job: Job,
    datasets: Mapping[str, DatasetInfo],
    private: Mapping[str, DatasetInfo],
) -> None:
    """Save the record of `job`; `datasets` are those of the host, 'public' among them."""
    record = PreparedData(
        _key(job),
        datasets["public"].element_spec,
        {name: info.num_samples for name, info in private.items()},
        _load_digests(project, job) | {name: _digest(info) for name, info in {**datasets, **private}.items()},
    )
    save_text(project.prepared(job.name), to_json(record) + "\n")


def find_changed(project: ProjectDirectory, job: Job, datasets: Mapping[str, DatasetInfo]) -> list[str]:
    """Return the data sets that are now described differently than when the same data was prepared."""
    before = _load_digests(project, job)
    now = {name: _digest(info) for name, info in datasets.items()}
    return [
        name
        for name, digest in now.items()
        if before.get(name, digest) != digest and before[name].partition(" ")[0] == digest.partition(" ")[0]
    ]


def _digest(info: DatasetInfo) -> str:
    return f"{info.fingerprint} {hashlib.sha256(to_json(info).encode()).hexdigest()}"


def _load_digests(project: ProjectDirectory, job: Job) -> dict[str, str]:
    record = _load(project, job)
    return record.digests if record else {}


def _load(project: ProjectDirectory, job: Job) -> PreparedData | None:
    path = project.prepared(job.name)
    try:
        return check_values(load_json(path), PreparedData, str(path))
    except InputError:  # the next `prepare` writes it again
        return None


def load_prepared(project: ProjectDirectory, job: Job) -> PreparedData | None:
    """Return the record of `job`; None when its current data section was never prepared."""
    record = _load(project, job)
    if record is None or record.key != _key(job):
        return None
    return record if min(record.public.num_samples, *record.num_private.values(), 0) >= 0 else None


def _key(job: Job) -> str:
    digest = hashlib.sha256(repr((job.public_path, job.private_path, job.reading)).encode())
    for file in job.reading.function_files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
