"""What a plan says about the strategies that were compared."""

from collections.abc import Mapping, Sequence

from csdctl.fleet.model import HOST_NAME
from csdctl.tuning.observations import TrialResult
from csdctl.tuning.plan import Predicted, RankPlan, StrategyPlan
from csdctl.tuning.strategies import Strategy, StrategyForecast


def list_strategies(
    found: Sequence[StrategyForecast], impossible: Mapping[Strategy, str]
) -> list[StrategyPlan]:
    """Return the forecasts, then the strategies that are not possible, and why."""
    strategies = [
        StrategyPlan(
            strategy=one.strategy,
            cut=one.cut,
            epoch_s=round(one.epoch_s, 3),
            first_run_s=round(one.first_run_s, 3),
            next_run_s=round(one.next_run_s, 3),
            sample_bytes=round(one.sample_bytes, 1),
            is_confirmed=one.is_confirmed,
            node_memory_bytes=one.node_memory_bytes,
            trains_on_host=one.trains_on_host,
        )
        for one in found
    ]
    strategies += [StrategyPlan(strategy=strategy, why_not=why) for strategy, why in impossible.items()]
    return strategies


def node_memory(ranks: Sequence[RankPlan]) -> int | None:
    """Return the largest peak memory of a node that was measured."""
    known = (rank.peak_memory_bytes for rank in ranks if rank.node != HOST_NAME)
    return max((peak for peak in known if peak), default=None)


def predicted_split(ranks: Sequence[RankPlan], result: TrialResult) -> Predicted:
    """Return the prediction of a split from its trial."""
    compute_s = sum(result.compute_s) / (len(ranks) * result.step_s)
    slowest = max(result.compute_s) / result.step_s
    return Predicted(
        global_batch=sum(rank.batch_size for rank in ranks),
        batch_sizes=[rank.batch_size for rank in ranks],
        step_s=round(result.step_s, 6),
        samples_per_s=round(result.samples_per_s, 2),
        compute_share=round(compute_s, 4),
        imbalance_share=round(max(0.0, slowest - compute_s), 4),
        communication_share=round(max(0.0, 1 - max(slowest, compute_s)), 4),
        is_confirmed=True,
    )
