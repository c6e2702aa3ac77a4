"""What a strategy decides about a run: data-parallel, which changes nothing, and split."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from csdctl.errors import InputError
from csdctl.job.model import Job
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT, Plan
from csdctl.worker.protocol.features import Recomputed
from csdctl.worker.protocol.model_info import CutInfo, ModelInfo
from csdctl.worker.protocol.run_spec import TRAIN_SPLIT, VERIFY_SPLIT, SplitSpec, TaskSpec
from csdctl.workflows.train.spec import RunContext, RunInputs


class Strategy:
    """Data-parallel: every rank holds the whole model. Other strategies override what they do differently.

    An instance belongs to one run; its methods are called in the order in which they stand here.
    """

    name: ClassVar[str] = DATA_PARALLEL
    cut = ""
    """The last layer that nodes compute, if the model is split."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the ranks that train. Raises InputError or PartialError."""
        return plan

    def build_inputs(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run with what its ranks compute and read. Raises InputError or PartialError."""
        return inputs

    def build_verification(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run that compares one step with one process. Raises InputError or PartialError."""
        return inputs

    def recompute_stored(self, inputs: RunInputs, context: RunContext) -> Mapping[str, Recomputed]:
        """Return, by machine, how results that are stored there compare with what it computes now."""
        return {}


_OTHERWISE = "train with --strategy data-parallel"


@dataclass
class Split(Strategy):
    """Nodes compute the first layers of the model, up to `cut`, the host the rest.

    Each rank's batch is divided into micro-batches: nodes compute some while the host computes others.
    """

    name: ClassVar[str] = SPLIT
    cut: str = ""
    num_micro_batches: int = SplitSpec.num_micro_batches

    def build_inputs(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run with its model divided.

        Raises InputError where the job does not allow that, or the model has no such cut.
        """
        return self._build(inputs, context, TRAIN_SPLIT)

    def build_verification(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the verification of the divided model; raises what `build_inputs` raises."""
        return self._build(inputs, context, VERIFY_SPLIT)

    def _build(self, inputs: RunInputs, context: RunContext, task: str) -> RunInputs:
        check_split(context)
        found = find_cut(context.prepared.model.info, self.cut)
        split = SplitSpec(found.layer, self.num_micro_batches)
        spec = replace(inputs.spec, task=TaskSpec(task), split=split, is_balanced=False)
        return replace(inputs, spec=spec)


def check_split(context: RunContext) -> None:
    """Raise InputError unless job and fleet allow that a model is split."""
    if context.space.fleet.networks:
        raise InputError("a model is split on one server; this fleet has several", remedy=_OTHERWISE)
    check_job(context.job)


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
            f"{info.name} cannot be split: it is not a functional model with one input and a single tensor "
            "between two layers",
            remedy=_OTHERWISE,
        )
    for cut in info.cuts:
        if cut.layer == layer:
            return cut
    names = ", ".join(cut.layer for cut in info.cuts)
    what = f"cannot be cut after {layer!r}" if layer else "needs a cut"
    raise InputError(f"{info.name} {what}; its cuts: {names}", remedy="name one of them: --cut LAYER")
