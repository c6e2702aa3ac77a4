"""Probes as they are measured, and the plan as a table and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich import box
from rich.table import Table

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.preparing import PreparationScreen
from csdctl.cli.render.tuning_view import TuningView
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_bytes, format_rate, format_seconds, format_share
from csdctl.tuning.plan import Plan, RankPlan, StrategyPlan
from csdctl.tuning.strategies import DATA_PARALLEL, FEATURES, SPLIT
from csdctl.worker.protocol.probe import ProbeResult
from csdctl.workflows.tune.watch import TuneWatch

SCHEMA = "csdctl.tune/1"
LEAVES = {
    DATA_PARALLEL: "sums of gradients",
    FEATURES: "sums of gradients of the head",
    SPLIT: "activations and labels of its samples, and sums of gradients",
}
FEATURES_LEAVE = "features of its public samples, once; the host trains alone"


class TuningScreen(PreparationScreen):
    """Shows one tuning run."""

    def measuring(self, machines: Sequence[str]) -> AbstractContextManager[TuneWatch]:
        """Open a view of what the machines do."""
        return _Measuring(self._streams.views, machines)


class _Measuring(TuningView):
    """The view, with a line for each round of probes."""

    def on_probes(self, results: Mapping[str, ProbeResult | None]) -> None:
        """Show the results of one round of probes."""
        super().on_probes(results)
        render_probes(self._console, results)


def render_probes(console: PrintableConsole, results: Mapping[str, ProbeResult | None]) -> None:
    """Print one line for one round of probes on all machines."""
    shown = [
        f"{name} {result.batch_size}: {format_seconds(result.step_time_s)}, "
        f"{format_rate(result.samples_per_s)}/s"
        if result
        else f"{name}: does not fit in memory"
        for name, result in results.items()
    ]
    console.print("  " + "  |  ".join(shown), soft_wrap=True)


def render_plan(console: PrintableConsole, plan: Plan, path: str) -> None:
    """Print the plan, its predicted throughput and time breakdown, and the path of its file."""
    title = f"plan for {plan.job} by {plan.method}" + (" (emulated fleet)" if plan.emulated else "")
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("node")
    for column in ("batch size", "threads", "step", "samples/s computing", "peak memory"):
        table.add_column(column, justify="right")
    for number, rank in enumerate(plan.ranks):
        is_micro_batched = rank.micro_batch_size is not None and rank.micro_batch_size < rank.batch_size
        micro_batches = f" (micro-batches of {rank.micro_batch_size})" if is_micro_batched else ""
        table.add_row(
            str(number),
            rank.node,
            f"{rank.batch_size}{micro_batches}",
            _show_runtime(rank),
            format_seconds(rank.step_time_s),
            format_rate(rank.samples_per_s),
            format_bytes(rank.peak_memory_bytes),
        )
    console.print(table)
    for line in _lines(plan):
        console.print(line, soft_wrap=True)
    _render_strategies(console, plan)
    console.print(f"plan: {path}", soft_wrap=True)


def _render_strategies(console: PrintableConsole, plan: Plan) -> None:
    """Print the strategies that were compared, and why others were not."""
    compared = [strategy for strategy in plan.strategies if strategy.first_run_s is not None]
    if len(compared) > 1:
        table = Table(
            title="strategies",
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("strategy", min_width=len(DATA_PARALLEL))
        table.add_column("cut", overflow="fold")
        for column in ("first run", "next", "epoch", "sent"):
            table.add_column(column, justify="right", no_wrap=True)
        for strategy in compared:
            is_chosen = (strategy.strategy, strategy.cut if strategy.strategy == "split" else "") == (
                plan.strategy,
                plan.cut,
            )
            table.add_row(
                strategy.strategy,
                strategy.cut,
                format_seconds(strategy.first_run_s),
                format_seconds(strategy.next_run_s),
                format_seconds(strategy.epoch_s),
                format_bytes(strategy.sample_bytes),
                style="bold" if is_chosen else "",
            )
        console.print(table)
        tried = [_describe_trial(strategy) for strategy in compared if strategy.is_confirmed]
        console.print(f"tried: {', '.join(tried) or 'none'}; forecast: the others", soft_wrap=True)
        cut = f" behind {plan.cut}" if plan.cut else ""
        leaves = FEATURES_LEAVE if plan.trains_on_host else LEAVES[plan.strategy]
        console.print(f"strategy: {plan.strategy}{cut}; a node sends {leaves}", soft_wrap=True)
    if impossible := [strategy.strategy for strategy in plan.strategies if strategy.why_not]:
        console.print(
            f"not compared: {', '.join(impossible)} (`strategies` in the plan says why)", soft_wrap=True
        )


def _describe_trial(strategy: StrategyPlan) -> str:
    memory = strategy.node_memory_bytes
    return f"{strategy.strategy} {strategy.cut}".strip() + (
        f" ({format_bytes(memory)} on a node)" if memory else ""
    )


def plan_document(plan: Plan, path: str) -> dict[str, Any]:
    """Return the `csdctl.tune/1` document."""
    return {
        "schema": SCHEMA,
        "path": path,
        "global_batch": plan.global_batch,
        "predicted_samples_per_s": plan.predicted_samples_per_s,
        **plan.model_dump(),
    }


def _show_runtime(rank: RankPlan) -> str:
    threads = f"{rank.threads} × {rank.inter_threads}" if rank.inter_threads > 1 else str(rank.threads)
    return threads if rank.onednn else f"{threads}, no oneDNN"


def _lines(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    rate = format_rate(plan.predicted_samples_per_s)
    measured = f"{plan.num_probes} probes" if plan.num_probes else "no probes: all from earlier measurements"
    measured += f", {format_seconds(plan.measuring_s)} of measuring"
    if predicted is None:
        yield f"global batch size {plan.global_batch}, at most {rate} samples/s ({measured})"
        return
    shown = "confirmed by a trial of all ranks" if predicted.is_confirmed else "not confirmed by a trial"
    yield f"global batch size {plan.global_batch}: {rate} samples/s, {shown} ({measured})"
    yield (
        f"of the ranks' time: {format_share(predicted.compute_share)} computing, "
        f"{format_share(predicted.imbalance_share)} waiting for the slowest, "
        f"{format_share(predicted.communication_share)} communicating"
    )
    if predicted.gain is not None:
        yield f"compared with the best equal batch size: {predicted.gain:+.0%} samples/s"
    if plan.left_out:
        yield f"left out, because training is faster without them: {format_node_names(plan.left_out)}"
