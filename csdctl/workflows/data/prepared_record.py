"""A record of a job's prepared data, to be read without contacting a machine.

Prepared data is stored under the hash of its content, private data on the nodes: neither can be found from
job.yaml without reading the sources again. Therefore `prepare_job` saves a record with counts and shapes, but
no samples and no file names.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from csdctl.documents import save_text
from csdctl.job.model import Job
from csdctl.runs.directory import ProjectDirectory
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import ProtocolError, from_json, to_json


@dataclass(frozen=True)
class PreparedData:
    """The prepared data of one job."""

    key: str
    """Hash of the job's data section; the data itself may have changed since."""
    public: DatasetInfo
    """Without class names."""
    num_private: dict[str, int] = field(default_factory=dict)
    """Private samples by node."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.public.num_samples + sum(self.num_private.values())


def save_prepared(
    project: ProjectDirectory, job: Job, public: DatasetInfo, private: Mapping[str, DatasetInfo]
) -> None:
    """Save the record of `job`."""
    record = PreparedData(
        _key(job),
        public.element_spec,
        {name: info.num_samples for name, info in private.items()},
    )
    save_text(project.prepared(job.name), to_json(record) + "\n")


def load_prepared(project: ProjectDirectory, job: Job) -> PreparedData | None:
    """Return the record of `job`; None when its current data section was never prepared."""
    try:
        record = from_json(PreparedData, project.prepared(job.name).read_text(encoding="utf-8"))
    except (OSError, ValueError, ProtocolError):  # the next `prepare` writes it again
        return None
    return record if record.key == _key(job) else None


def _key(job: Job) -> str:
    digest = hashlib.sha256(repr((job.public_path, job.private_path, job.reading)).encode())
    for file in job.reading.function_files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
