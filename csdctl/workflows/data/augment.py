"""Try `data.augment` on public samples of the host, once for each version of function and data."""

import hashlib
import sys

from csdctl.documents import save_json
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import StoredFile
from csdctl.shipping.worker_calls import call_worker
from csdctl.transport.program import within
from csdctl.transport.session import Session
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import AugmentTrial, AugmentTried
from csdctl.workflows.data.model import SerializedModel

DEADLINE_S = 300.0


def check_augment(
    job: Job,
    model: SerializedModel,
    public: DatasetInfo,
    worker: StoredFile,
    host: Session,
    project: ProjectDirectory,
    say: Say,
) -> None:
    """Raise InputError if the job's augmentation does not return what a rank can train on."""
    code = model.user_code
    if not job.recipe.augment or code is None:
        return
    trial = AugmentTrial(job.recipe.augment, code, public.path, job.recipe.seed)
    content = f"{to_json(trial)} {worker.sha256} {public.images_sha256} {public.labels_sha256}"
    tried = project.models / f"augment-{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"
    if tried.is_file():
        return
    found = call_worker(
        host,
        sys.executable,
        worker.path,
        "augment",
        trial,
        AugmentTried,
        doing="trying data.augment",
        patience=within(DEADLINE_S),
    )
    say(
        f"augmentation of training batches: {job.recipe.augment}, tried on {found.num_samples} public samples"
    )
    save_json(tried, {"num_samples": found.num_samples})
