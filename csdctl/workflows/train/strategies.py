"""What a strategy decides about a run: data-parallel, the default, split and features."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from csdctl.errors import InputError, option
from csdctl.job.model import Job
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT, Plan
from csdctl.worker.protocol.features import FLOAT32, Recomputed
from csdctl.worker.protocol.model_info import CutInfo, ModelInfo
from csdctl.worker.protocol.run_spec import TRAIN, TRAIN_SPLIT, VERIFY, VERIFY_SPLIT, RunSpec, SplitSpec
from csdctl.workflows.train.features import (
    FeatureRun,
    compute_features,
    divide_model,
    leave_to_host,
    recompute_features,
)
from csdctl.workflows.train.request import AUTO, TrainOptions
from csdctl.workflows.train.spec import RunContext, RunData, RunModel

OTHER_STRATEGY = f"train with {option('strategy')} data-parallel"


class Strategy:
    """Data-parallel: every rank holds the whole model. Other strategies override what they do differently.

    An instance belongs to one run. Its methods are called in the order in which they stand here.
    """

    name: ClassVar[str] = DATA_PARALLEL
    cut = ""
    """The last layer that nodes compute, if the model is split."""
    training_task, verification_task = TRAIN, VERIFY
    is_balanced = True
    """Whether batch sizes may change during the run."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the ranks that train. Raises InputError or PartialError."""
        return plan

    def divide(self, context: RunContext, *, is_verification: bool = False) -> RunModel:
        """Return what the ranks compute. Raises InputError if the job or the model does not allow it.

        `is_verification`: the step computes in 32 bits at least.
        """
        model = context.compiler.step(is_wide=True) if is_verification else context.prepared.model
        return RunModel(model, model)

    def compute(
        self, data: RunData, model: RunModel, context: RunContext, *, is_verification: bool = False
    ) -> tuple[RunData, dict[str, Any]]:
        """Return what the ranks read, and what the manifest says of it. Raises PartialError.

        `is_verification`: the ranks take random samples.
        """
        return data, {}

    def recompute_stored(
        self, data: RunData, model: RunModel, context: RunContext
    ) -> Mapping[str, Recomputed]:
        """Return, by machine, how results that are stored there compare with what it computes now."""
        return {}


@dataclass
class SplitStrategy(Strategy):
    """Nodes compute the first layers of the model, up to `cut`, the host the rest.

    Each rank's batch is divided into micro-batches: nodes compute some while the host computes others.
    """

    name: ClassVar[str] = SPLIT
    cut: str = ""
    num_micro_batches: int = SplitSpec.num_micro_batches
    training_task, verification_task = TRAIN_SPLIT, VERIFY_SPLIT
    is_balanced = False

    def divide(self, context: RunContext, *, is_verification: bool = False) -> RunModel:
        """Return the two parts of the model. Raises InputError if the job or the model does not allow it."""
        check_split(context)
        cut = find_cut(context.prepared.model.info, self.cut)
        return cut_model(context, cut.layer, self.num_micro_batches)


def cut_model(
    context: RunContext, layer: str, num_micro_batches: int = SplitSpec.num_micro_batches
) -> RunModel:
    """Return the model cut behind `layer`. Raises InputError if it cannot be."""
    on_host, on_nodes = context.compiler.split(layer)
    return RunModel(on_host, on_nodes, split=SplitSpec(layer, num_micro_batches, on_nodes.step))


def check_split(context: RunContext) -> None:
    """Raise InputError unless job and fleet allow that a model is split."""
    if context.space.fleet.networks:
        raise InputError("a model is split on one server; this fleet has several", remedy=OTHER_STRATEGY)
    check_job(context.job)


def check_job(job: Job) -> None:
    """Raise InputError unless the job lets activations of private samples leave their node."""
    if job.noise:
        raise InputError(
            f"{job.path}: data.private.noise hides each sample in a sum, and activations leave their node "
            "one by one",
            remedy=OTHER_STRATEGY,
        )
    if job.data.private and job.data.private.activations != "may-leave":
        raise InputError(
            f"{job.path}: splitting the model sends activations and labels of private samples to the host, "
            "which the job does not allow",
            remedy="add `activations: may-leave` to data.private (docs/how-to/split.md), "
            f"or {OTHER_STRATEGY}",
        )


def find_cut(info: ModelInfo, layer: str) -> CutInfo:
    """Return the cut behind `layer`. Raises InputError that lists the model's cuts."""
    if not info.cuts:
        raise InputError(
            f"{info.name} cannot be split: it is not a functional model with a single tensor "
            "between two layers",
            remedy=OTHER_STRATEGY,
        )
    for cut in info.cuts:
        if cut.layer == layer and cut.num_bytes:
            return cut
        if cut.layer == layer:
            raise InputError(
                f"{info.name} cannot be cut after {layer!r}, whose activations have no fixed size",
                remedy="give its input a fixed shape, or name another cut",
            )
    names = ", ".join(cut.layer for cut in info.cuts)
    what = f"cannot be cut after {layer!r}" if layer else "needs a cut"
    remedy = f"name one of them: {option('cut')} LAYER"
    raise InputError(f"{info.name} {what}; its cuts: {names}", remedy=remedy)


class FeatureStrategy(Strategy):
    """Each machine computes the features of its samples once. The ranks train the model's head."""

    name = FEATURES

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._gathered: FeatureRun | None = None
        """The features that all machines have computed for the host, which trains alone."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the host alone, if it says so and the job allows it. Raises PartialError."""
        if plan.trains_on_host:
            plan, self._gathered = leave_to_host(plan, context, self._precision)
        return plan

    def divide(self, context: RunContext, *, is_verification: bool = False) -> RunModel:
        """Return the model's head. Raises InputError if the model has no frozen part."""
        precision = FLOAT32 if is_verification else self._precision
        return divide_model(context, precision, is_wide=is_verification)

    def compute(
        self, data: RunData, model: RunModel, context: RunContext, *, is_verification: bool = False
    ) -> tuple[RunData, dict[str, Any]]:
        """Return the features of all samples, which each machine computes. Raises PartialError.

        In a verification, each rank computes the features of its random samples itself.
        """
        if is_verification:
            names, files = context.space.fleet.machines, model.prefix_files
            shards = {name: (*data.shards.get(name, ()), *files) for name in names}
            return replace(data, shards=shards), {}
        data, computed = compute_features(data, model, context)
        if self._gathered is None:
            context.events.say(computed.describe())
        return replace(data, shards={}), (self._gathered or computed).describe_for_manifest()

    def recompute_stored(self, data: RunData, model: RunModel, context: RunContext) -> dict[str, Recomputed]:
        """Compute some of the stored features of each machine there again, and compare them.

        Raises InputError if the model has no frozen part, and PartialError naming the machines that failed.
        """
        return recompute_features(data, divide_model(context, self._precision), context)


def choose_strategy(options: TrainOptions, plan: Plan) -> Strategy:
    """Return the strategy that the user asks for. Without one, the strategy of `plan`."""
    name = plan.strategy if options.strategy == AUTO else options.strategy
    options.check_strategy_options(name)
    if name == SPLIT:
        cut = options.cut or (plan.cut if plan.strategy == SPLIT else "")
        return SplitStrategy(cut, options.num_micro_batches)
    return FeatureStrategy(options.feature_precision) if name == FEATURES else Strategy()


def strategy_of(spec: RunSpec) -> Strategy:
    """Return the strategy with which a run began."""
    if spec.split:
        return SplitStrategy(spec.split.cut, spec.split.num_micro_batches)
    if spec.head:
        return FeatureStrategy(spec.head.prefix.precision)
    return Strategy()
