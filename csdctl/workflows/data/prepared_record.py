"""What a job's data came to when it was last prepared, for those who ask without touching a machine.

Prepared data lies below the hash of its content, private data on its nodes: neither can be found from
job.yaml without reading the sources again. So `prepare_job` leaves a note: counts and shapes, no sample and
no file name.
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
    """Of one job."""

    key: str
    """Of what the job says of its data; the data itself may have changed since."""
    public: DatasetInfo
    """Without its classes."""
    num_private: dict[str, int] = field(default_factory=dict)
    """Samples by node."""

    @property
    def num_samples(self) -> int:
        """Of an epoch."""
        return self.public.num_samples + sum(self.num_private.values())


def save_prepared(
    project: ProjectDirectory, job: Job, public: DatasetInfo, private: Mapping[str, DatasetInfo]
) -> None:
    """Leave the note of `job`."""
    note = PreparedData(
        _key(job),
        public.element_spec,
        {name: info.num_samples for name, info in private.items()},
    )
    save_text(project.prepared(job.name), to_json(note) + "\n")


def load_prepared(project: ProjectDirectory, job: Job) -> PreparedData | None:
    """The note of `job`; None when its data, as the job has it now, was never prepared."""
    try:
        note = from_json(PreparedData, project.prepared(job.name).read_text(encoding="utf-8"))
    except (OSError, ValueError, ProtocolError):  # preparing writes it anew
        return None
    return note if note.key == _key(job) else None


def _key(job: Job) -> str:
    digest = hashlib.sha256(repr((job.public_path, job.private_path, job.reading)).encode())
    for file in job.reading.function_files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
