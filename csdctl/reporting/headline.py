"""The headline of a run: its result, what held it back, and what to do next."""

from dataclasses import dataclass, replace

from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import (
    format_loss,
    format_metrics,
    format_rate,
    format_seconds,
    format_share,
)
from csdctl.reporting.results import DONE, FAILED, RUNNING, RunResults, RunSummary
from csdctl.reporting.series import (
    BY_COMPUTE,
    BY_HEAT,
    BY_INPUT,
    BY_LINK,
    COMMUNICATION,
    MIN_SHARE,
    OTHER,
    WAIT,
    Bottleneck,
    find_bottleneck,
)

MANY = 0.15
"""Share of a run's time that evaluation and checkpoints may take before the headline names them."""
SHORTFALL = 0.9
"""Throughput over the predicted one; below, the plan no longer fits."""
ADVICE = {
    BY_COMPUTE: "Look for other programs on {node}, then measure again with `csdctl tune`.",
    BY_HEAT: "Cool {node}.",
    BY_INPUT: "Store the prepared data of {node} on a faster drive.",
    BY_LINK: "Check the links, or use larger batches, which communicate less often.",
}


@dataclass(frozen=True)
class Headline:
    """What decides, in three sentences."""

    result: str
    held_back: str
    next_step: str

    def lines(self) -> list[tuple[str, str]]:
        """Return name and text of each."""
        return [("result", self.result), ("held back by", self.held_back), ("next", self.next_step)]


def write_headline(run: RunResults) -> Headline:
    """Return the headline of a run."""
    bottleneck = find_bottleneck(run.series)
    return Headline(
        describe_result(replace(run.summary, state=RUNNING) if run.is_running else run.summary),
        describe_bottleneck(run, bottleneck) if bottleneck else _describe_waiting(run),
        _advise(run, bottleneck),
    )


def describe_result(summary: RunSummary) -> str:
    """Return how the run ended, what it learnt and how fast it was."""
    validation = format_metrics(summary.validation_accuracy, summary.validation_metrics)
    reached = validation.replace(", ", ", validation ", 1)
    if summary.loss is not None and not reached:
        reached = f", loss {format_loss(summary.loss)}"
    host = summary.ranks[0].alone_samples_per_s if summary.num_ranks > 1 else None
    ratio = f" ({summary.samples_per_s / host:.2f} × the host alone)" if host else ""
    rate = f", {format_rate(summary.samples_per_s)} samples/s{ratio}" if summary.samples_per_s else ""
    epochs = f"{summary.epochs} epoch{'' if summary.epochs == 1 else 's'}"
    return f"{summary.state}: {epochs}{reached}{rate}"


def describe_bottleneck(run: RunResults, bottleneck: Bottleneck) -> str:
    """Return who held the ranks back, for how long, and what shows the cause."""
    if bottleneck.rank is None:
        return f"{bottleneck.cause}: {bottleneck.why}"
    node, since = run.series.nodes[bottleneck.rank], format_seconds(bottleneck.since_s)
    return (
        f"{node} (rank {bottleneck.rank}), {bottleneck.cause}: {bottleneck.why}; "
        f"the others waited {format_seconds(bottleneck.lost_s)} for it, mostly since {since}"
    )


def _describe_waiting(run: RunResults) -> str:
    """Return what the ranks waited for, although no single rank or link stands out."""
    ranks, spent = run.summary.ranks, run.series.spent_s
    wait_s, step_s = sum(rank.wait_s for rank in ranks), sum(rank.compute_s + rank.wait_s for rank in ranks)
    if not step_s:
        return "unknown: no step was reported"
    whole_s = sum(sum(seconds) for kinds in spent for seconds in kinds.values())
    other = sum(sum(kinds[OTHER]) for kinds in spent) / whole_s if whole_s else 0.0
    ends = f"; evaluation and checkpoints took {format_share(other)} of the run" if other >= MANY else ""
    waited = f"{format_share(wait_s / step_s)} of the step time"
    if len(ranks) > 1 and wait_s >= MIN_SHARE * step_s:
        if not whole_s or not run.series.is_wait_divided:
            return f"waiting and communication, {waited}; the run did not record which rank was slow{ends}"
        wait, sums = (sum(sum(kinds[kind]) for kinds in spent) / step_s for kind in (WAIT, COMMUNICATION))
        parts = f"{format_share(wait)} for slower ranks, {format_share(sums)} in communication"
        return f"waiting, {waited} ({parts}); no single rank caused it{ends}"
    return f"nothing: the ranks computed for {format_share(1 - wait_s / step_s)} of the step time{ends}"


def _advise(run: RunResults, bottleneck: Bottleneck | None) -> str:
    """Return the one thing to do next."""
    summary, predicted = run.summary, run.summary.predicted_samples_per_s
    if run.is_running:
        return f"Follow it: `csdctl runs watch {summary.run_id}`."
    if summary.state != DONE:
        logs = "See the logs in the run directory, then resume"
        first = (
            "Fix the failure, then resume"
            if summary.failures
            else logs
            if summary.state == FAILED
            else "Resume"
        )
        return f"{first}: `csdctl train --resume {summary.run_id}`."
    if summary.lost_nodes:
        return f"Check {format_node_names(summary.lost_nodes)} with `csdctl doctor`."
    if bottleneck:
        node = run.series.nodes[bottleneck.rank] if bottleneck.rank is not None else ""
        return ADVICE[bottleneck.cause].replace("{node}", "the host" if node == HOST_NAME else node)
    if predicted and summary.samples_per_s < SHORTFALL * predicted:
        reached = format_share(summary.samples_per_s / predicted)
        return f"Measure again with `csdctl tune`: the run reached {reached} of the predicted throughput."
    return f"Use the model: `csdctl predict {summary.run_id}`."
