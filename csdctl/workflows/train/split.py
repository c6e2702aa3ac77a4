"""Training with the model divided between nodes and host: what a job must allow, and where to cut."""

import dataclasses

from csdctl.errors import InputError
from csdctl.job.model import Job
from csdctl.worker.protocol.model_info import CutInfo, ModelInfo
from csdctl.worker.protocol.run_spec import RunSpec, SplitSpec
from csdctl.worker.protocol.tasks import TRAIN_SPLIT, TaskSpec
from csdctl.workflows.data.prepare import Prepared

_OTHERWISE = "train with --strategy data-parallel"


def use_split(spec: RunSpec, job: Job, prepared: Prepared, cut: str, num_micro_batches: int) -> RunSpec:
    """Return the run with its model cut behind the layer `cut`.

    Raises InputError where the job does not allow that, or the model has no such cut.
    """
    check_job(job)
    found = find_cut(prepared.model.info, cut)
    return dataclasses.replace(
        spec, task=TaskSpec(TRAIN_SPLIT), split=SplitSpec(found.layer, num_micro_batches), is_balanced=False
    )


def check_job(job: Job) -> None:
    """Raise InputError unless the job lets activations of private samples leave their node."""
    if job.noise:
        raise InputError(
            f"{job.path}: data.private.noise hides each sample in a sum, and activations leave their node "
            "one by one",
            remedy=_OTHERWISE,
        )
    if job.private_path is not None and not job.may_activations_leave:
        raise InputError(
            f"{job.path}: splitting the model sends activations and labels of private samples to the host, "
            "which the job does not allow",
            remedy=f"add `activations: may-leave` to data.private (docs/how-to/split.md), or {_OTHERWISE}",
        )


def find_cut(info: ModelInfo, layer: str) -> CutInfo:
    """Return the cut behind `layer`; raises InputError, naming those that there are."""
    if not info.cuts:
        raise InputError(
            f"{info.name} cannot be split: it is no functional model with one input and a single tensor "
            "between two layers",
            remedy=_OTHERWISE,
        )
    for cut in info.cuts:
        if cut.layer == layer:
            return cut
    names = ", ".join(cut.layer for cut in info.cuts)
    what = f"cannot be cut behind {layer!r}" if layer else "has to be cut somewhere"
    raise InputError(f"{info.name} {what}; its cuts: {names}", remedy="name one of them: --cut LAYER")
