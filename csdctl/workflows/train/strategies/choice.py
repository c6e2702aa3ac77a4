"""The strategy of one run: as the user asks, as the plan says, or as the run that is resumed began."""

from csdctl.tuning.plan import Plan
from csdctl.tuning.strategies import FEATURES, SPLIT
from csdctl.worker.protocol.features import KERAS, LITERT, FeatureOptions
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.train.options import TrainOptions, choose_planned_strategy
from csdctl.workflows.train.strategies.features import Features
from csdctl.workflows.train.strategies.strategy import Split, Strategy


def choose_strategy(options: TrainOptions, plan: Plan) -> Strategy:
    """Return the strategy that the user asks for; without one, that of `plan`."""
    name, cut = choose_planned_strategy(options.strategy, options.cut, plan)
    if name == SPLIT:
        return Split(cut, options.num_micro_batches)
    return Features(options.features) if name == FEATURES else Strategy()


def strategy_of(spec: RunSpec) -> Strategy:
    """Return the strategy with which a run began."""
    if spec.split:
        return Split(spec.split.cut, spec.split.num_micro_batches)
    if spec.head:
        prefix = spec.head.prefix
        return Features(FeatureOptions(prefix.precision, LITERT if prefix.lite else KERAS))
    return Strategy()
