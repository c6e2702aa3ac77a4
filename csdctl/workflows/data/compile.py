"""Compiles the step of a job's model in a worker process on the host; the result is cached by content."""

import hashlib
import json
import sys
from dataclasses import replace
from importlib.metadata import version

from csdctl.documents import build_atomically, load_kept, save_json
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.shipping.store import StoredFile, hash_file, store_file
from csdctl.shipping.worker_calls import call_worker
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import within
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import Compiled, CompileRequest
from csdctl.workflows.data.files import HASHES, SerializedModel, have_hashes
from csdctl.workflows.workspace.workspace import Workspace

FILES = ("graph.pb", "info.json", "state.npz")
TEMPLATES = ("template.keras", "template.weights.h5")
"""The model as Keras saves it; only the host needs it."""
REASON = "reason.json"
DEADLINE_S = 600.0


def compile_step(
    job: Job, model: SerializedModel, public: DatasetInfo, worker: StoredFile, space: Workspace, say: Say
) -> SerializedModel:
    """Return the model with its compiled step, or with why it cannot be compiled.

    `public`: the prepared data, whose shapes and types count. Raises InputError for a model that ranks cannot
    train together.
    """
    project = space.project
    data = replace(public.element_spec, path="", fingerprint="", num_samples=0)
    request = CompileRequest(
        model.architecture.path,
        model.weights.path,
        model.info.recipe,
        data,
        "",
        model.user_code if model.info.needs_code else None,
        has_noise=job.noise is not None,
        has_validation=job.validation_path is not None,
    )
    described = [to_json(request), worker.sha256, *map(version, ("keras", "numpy"))]
    key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
    directory = project.models / f"step-{key}"
    if not have_hashes(directory, (REASON,)) or (
        not load_kept(directory / REASON, str) and not have_hashes(directory, (REASON, *FILES))
    ):
        say("compiling the step")
        with build_atomically(directory) as aside:
            compiled = call_worker(
                space.sessions[HOST_NAME],
                sys.executable,
                worker.path,
                "compile",
                replace(request, output=str(aside)),
                Compiled,
                doing="compiling the step",
                patience=within(DEADLINE_S),
            )
            save_json(aside / REASON, compiled.reason)
            names = [name for name in (REASON, *FILES, *TEMPLATES) if (aside / name).exists()]
            save_json(aside / HASHES, {name: hash_file(aside / name) for name in names})
    reason = load_kept(directory / REASON, str) or ""
    if reason:
        say(f"the step runs with Python's TensorFlow: {reason}")
        return replace(model, not_compiled=reason)
    files = (store_file(directory / name, project.root, TrafficClass.MODEL) for name in FILES)
    found = [directory / name for name in TEMPLATES if (directory / name).exists()]
    template = str(found[0].relative_to(project.root)) if found else ""
    return replace(model, compiled=tuple(files), template=template)
