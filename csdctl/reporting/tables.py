"""The results of runs as rows of text, for the terminal and for the HTML report.

Speed-up is the throughput over the throughput of the host alone, as in figure 6 of the STANNIS paper.
Efficiency is the throughput over the sum of the ranks' throughputs by themselves, so 100% loses nothing to
waiting and communication.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.names import format_node_names
from csdctl.reporting import series
from csdctl.reporting.numbers import (
    format_count,
    format_loss,
    format_metrics,
    format_range,
    format_rate,
    format_seconds,
    format_share,
    name_metrics,
)
from csdctl.reporting.privacy import describe_privacy
from csdctl.reporting.results import COMPLETED, FAILED, RUNNING, RunResults, RunSummary
from csdctl.reporting.series import BY_COMPUTE, BY_LINK, Bottleneck, find_bottleneck
from csdctl.runs.ledger import STATED
from csdctl.runs.stored_events import EVENTS_LOST
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT
from csdctl.worker.protocol.events import MAX_STEPS
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import LAST_MODEL

ADVICE = {
    BY_COMPUTE: "Measure again with `csdctl tune`; if {node} stays slow, look for other programs there.",
    series.BY_INPUT: "Store the prepared data of {node} on a faster drive.",
    BY_LINK: "Use larger batches, which communicate less often, or a faster link.",
}
"""Remedies for a bottleneck, by its cause."""
MAX_EFFICIENCY = 1.02
"""A larger efficiency is impossible: the standalone throughput was measured too low."""
UNDER_LOAD = "standalone throughput was measured under load: tune again"
REACHABLE = {
    DATA_PARALLEL: "the sum of the ranks' standalone throughput",
    SPLIT: "the throughput if the busiest rank never waited",
}
"""The reference of efficiency, by strategy."""
WEAK, STRONG = "weak", "strong"
KINDS = {
    WEAK: "weak scaling: the global batch grows with the ranks",
    STRONG: "strong scaling: the global batch stays",
}
"""The kinds of a scaling series, in words."""


def write_headline(run: RunResults) -> dict[str, str]:
    """Return its result, what held it back, and what to do next."""
    bottleneck = find_bottleneck(run.series)
    return {
        "result": describe_result(run.summary),
        "held back by": _describe_bottleneck(run, bottleneck) if bottleneck else _describe_waiting(run),
        "next": _advise(run, bottleneck),
    }


def describe_result(summary: RunSummary) -> str:
    """Return how the run ended, what it learnt and how fast it was."""
    validation = format_metrics(summary.validation_accuracy, summary.validation_metrics)
    reached = validation.replace(", ", ", validation ", 1)
    if summary.loss is not None and not reached:
        reached = f", loss {format_loss(summary.loss)}"
    host = summary.host_samples_per_s
    ratio = f" ({summary.samples_per_s / host:.2f} × the host alone)" if host else ""
    rate = f", {format_rate(summary.samples_per_s)} samples/s{ratio}" if summary.samples_per_s else ""
    loss = f", validation loss {format_loss(summary.best_validation_loss)}"
    best = f"; best: epoch {summary.best_epoch}{loss}, best.keras" * bool(summary.best_epoch)
    done = EVENTS_LOST if summary.reason == EVENTS_LOST else format_count(summary.epochs, "epoch")
    if summary.reason == MAX_STEPS:
        done = f"{format_count(summary.steps, 'step')} (--max-steps)"
    return f"{summary.state}: {done}{reached}{rate}{best}"


def _describe_bottleneck(run: RunResults, bottleneck: Bottleneck) -> str:
    if bottleneck.rank is None:
        return f"{bottleneck.cause}: {bottleneck.why}"
    node, since = run.series.nodes[bottleneck.rank], format_seconds(bottleneck.since_s)
    return (
        f"{node} (rank {bottleneck.rank}), {bottleneck.cause}: {bottleneck.why}; "
        f"the others waited {format_seconds(bottleneck.lost_s)} for it, mostly from {since} after the start"
    )


def _describe_waiting(run: RunResults) -> str:
    ranks, spent = run.summary.ranks, run.series.spent_s
    wait_s, step_s = sum(rank.wait_s for rank in ranks), sum(rank.compute_s + rank.wait_s for rank in ranks)
    if not step_s:
        return "unknown: no step was reported"
    run_s = sum(sum(seconds) for kinds in spent for seconds in kinds.values())
    between = sum(sum(kinds[series.OTHER]) for kinds in spent) / run_s if run_s else 0.0
    ends = f"; evaluation and checkpoints took {format_share(between)} of the run" if between >= 0.15 else ""
    waited = f"{format_share(wait_s / step_s)} of the step time"
    if len(ranks) > 1 and wait_s >= series.MIN_SHARE * step_s:
        if not run_s or not run.series.is_wait_divided:
            return f"waiting and communication, {waited}; the run did not record which rank was slow{ends}"
        wait, sums = (
            sum(sum(kinds[kind]) for kinds in spent) / step_s for kind in (series.WAIT, series.COMMUNICATION)
        )
        parts = f"{format_share(wait)} for slower ranks, {format_share(sums)} in communication"
        return f"waiting, {waited} ({parts}); no single rank caused it{ends}"
    return f"nothing: the ranks computed for {format_share(1 - wait_s / step_s)} of the step time{ends}"


def _advise(run: RunResults, bottleneck: Bottleneck | None) -> str:
    summary, predicted = run.summary, run.summary.predicted_samples_per_s
    if summary.state == RUNNING:
        return f"Follow it: `csdctl runs watch {summary.run_id}`."
    if summary.state != COMPLETED:
        first = "Fix the failure (see the logs), then resume" if summary.state == FAILED else "Resume"
        return f"{first}: `csdctl train --resume {summary.run_id}`."
    if summary.lost_nodes:
        return f"Check {format_node_names(summary.lost_nodes)} with `csdctl doctor`."
    if summary.method == "equal" and predicted is None:
        return "Use a plan (`csdctl tune`) instead of --batch-size."
    least = summary.predicted_range[0] if summary.predicted_range else 0.9 * (predicted or 0.0)
    is_as_planned = bool(predicted) and summary.samples_per_s >= least
    expected = {BY_LINK: summary.emulated, BY_COMPUTE: is_as_planned}  # emulated: it has no links of its own
    if bottleneck and not expected.get(bottleneck.cause):
        node = run.series.nodes[bottleneck.rank] if bottleneck.rank is not None else ""
        return ADVICE[bottleneck.cause].replace("{node}", "the host" if node == HOST_NAME else node)
    if predicted and summary.samples_per_s and not is_as_planned:  # the plan no longer fits
        reached = format_share(summary.samples_per_s / predicted)
        return f"Measure again with `csdctl tune`: the run reached {reached} of the predicted throughput."
    return f"Use the model: `csdctl predict {summary.run_id}`."


@dataclass(frozen=True)
class DataTable:
    """Rows of text under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def without_empty_columns(self) -> "DataTable":
        """Return the columns in which a row has a value, and always the first."""
        columns = [
            (name, *cells)
            for name, *cells in zip(self.header, *self.rows, strict=True)
            if name == self.header[0] or {*cells} - {"", "–"}
        ]
        header, *rows = zip(*columns, strict=True)
        return DataTable(header, tuple(rows))


def describe_run(summary: RunSummary) -> list[tuple[str, str]]:
    """Return name and text of each result of a run."""
    training = name_metrics(summary.accuracy, summary.metrics)
    validation = name_metrics(summary.validation_accuracy, summary.validation_metrics)
    cut = f" after {summary.cut}" if summary.cut else ""
    sizes = "equal batch sizes" if summary.method == "equal" else f"batch sizes by {summary.method}"
    epochs = format_count(summary.epochs, "epoch") if summary.epochs else "no complete epoch"
    count = f"{summary.steps:,} steps of {summary.global_batch}, {summary.samples:,} samples"
    identical = "identical on all ranks at the end of every epoch"
    lost = format_node_names(summary.lost_nodes)
    if unread := summary.num_private_unread:
        lost += f"; {unread:,} private samples were not read"
    again = {LAST_MODEL: f"`csdctl train --resume {summary.run_id}` saves it again if a checkpoint is left"}
    log = f"runs/{summary.run_id}/events.jsonl"
    skipped = f"{summary.num_unreadable:,} lines of {log} were skipped: damaged, or of another version"
    missing = f"the end of {format_count(summary.num_missing, 'epoch')}: csdctl, its host or lines were lost"
    num_changes = max(summary.num_tried, summary.num_rebalanced)  # earlier versions tried none
    changes = f"{format_count(num_changes, 'change')} of batch sizes tried, {summary.num_rebalanced} kept"
    left_out = format_node_names(summary.left_out)
    energy = summary.energy.describe_total() if summary.energy else []
    privacy = describe_privacy(summary.privacy) if summary.privacy else []
    rows = [
        ("throughput", _describe_speed(summary)),
        ("efficiency", _describe_efficiency(summary)),
        *(
            (name, _describe_metric(validation.get(name), training.get(name)))
            for name in {**training, **validation}
        ),
        ("loss", _describe_metric(summary.validation_loss, summary.loss)),
        ("trained", f"{epochs}, {count} in {format_seconds(summary.training_s)}"),
        ("gradient noise scale", f"{summary.noise_scale:,.0f} samples" if summary.noise_scale else ""),
        ("strategy", f"{summary.strategy}{cut}, {sizes}"),
        ("weights", identical if summary.identical_weights else "not compared"),
        *(("energy", line) for line in energy),
        *(("privacy", line) for line in privacy),
        ("lost", lost),
        ("events", skipped if summary.num_unreadable else ""),
        ("events", f"{log} lacks {missing}" * bool(summary.num_missing)),
        ("events", describe_breaks(summary.num_breaks, summary.run_id) if summary.num_breaks else ""),
        *(
            ("model", f"{name} is missing, unreadable or replaced: {again.get(name, 'train again')}")
            for name in summary.missing_models
        ),
        ("left out", f"{left_out}: training is faster without them, by the plan" if left_out else ""),
        ("balance", changes if num_changes else ""),
    ]
    return [(name, text) for name, text in rows if text]


def describe_breaks(num_breaks: int, run_id: str) -> str:
    """Return what is wrong with the events of a run whose lines are not as they were written."""
    where = f"at {format_count(num_breaks, 'place')} of runs/{run_id}/events.jsonl"
    return f"{where}, lines are lost, repeated, changed or of another run: figures may be wrong"


def _describe_metric(validation: float | None, training: float | None) -> str:
    values = {"validation": validation, "training": training}
    return ", ".join(f"{format_loss(value)} {name}" for name, value in values.items() if value is not None)


def _describe_speed(summary: RunSummary) -> str:
    text = f"{format_rate(summary.samples_per_s)} samples/s"
    if summary.predicted_samples_per_s is not None:
        text += f"; predicted {format_rate(summary.predicted_samples_per_s)}"
        text += f" ({format_range(summary.predicted_range)})" if summary.predicted_range else ""
    if host := summary.host_samples_per_s:
        text += f"; {summary.samples_per_s / host:.2f} × the host alone ({format_rate(host)}, predicted)"
    return text


def _describe_efficiency(summary: RunSummary) -> str:
    if summary.efficiency is None or summary.strategy not in REACHABLE:
        if summary.strategy != DATA_PARALLEL:
            return f"unknown: strategy {summary.strategy}"
        measured = all(rank.alone_samples_per_s for rank in summary.ranks if rank.batch_size)
        return f"unknown: {'no step was reported' if measured else 'the plan has no standalone throughput'}"
    reachable = f"{format_rate(summary.alone_samples_per_s)} samples/s, {REACHABLE[summary.strategy]}"
    loaded = f"; {UNDER_LOAD}" if summary.efficiency > MAX_EFFICIENCY else ""
    return f"{format_share(summary.efficiency)} of {reachable}{loaded}"


def compare(runs: Sequence[RunResults], described: Sequence[Sequence[tuple[str, str]]]) -> DataTable:
    """Return what is described of runs side by side, a column for each. A single one needs no header."""
    columns: list[dict[str, str]] = [{} for _ in runs]
    for column, pairs in zip(columns, described, strict=True):
        for name, text in pairs:
            column[name] = f"{column[name]}; {text}" if name in column else text
    names = dict.fromkeys(name for column in columns for name in column)
    rows = tuple((name, *(column.get(name, "–") for column in columns)) for name in names)
    return DataTable(("", *(run.summary.run_id for run in runs)) if len(runs) > 1 else (), rows)


def describe_settings(run: RunResults) -> list[tuple[str, str]]:
    """Return name and text of model, recipe and software of a run, as far as its manifest has them."""
    manifest, defaults = run.manifest, json.loads(json.dumps(asdict(Recipe())))
    recipe = {key: value for key, value in manifest.recipe.items() if value and value != defaults.get(key)}
    software = {"csdctl": manifest.csdctl, **manifest.versions}
    pairs = {
        "model": str(manifest.job.get("model", "")),
        "recipe": ", ".join(f"{key}: {json.dumps(value)}" for key, value in recipe.items()),
        "software": ", ".join(f"{name} {version}" for name, version in software.items()),
    }
    return [(name, text) for name, text in pairs.items() if text]


def tabulate_ranks(summary: RunSummary) -> DataTable:
    """Return the samples, the throughput and the waiting of each rank."""
    rows = tuple(
        (
            f"{rank.rank} {rank.node}",
            str(rank.batch_size),
            f"{rank.num_private:,}" if rank.num_private else "–",
            f"{rank.num_public:,}" if rank.num_public else "–",
            format_rate(rank.samples_per_s or None),
            format_rate(rank.alone_samples_per_s),
            format_share(rank.waiting) if rank.compute_s + rank.wait_s else "–",
        )
        for rank in summary.ranks
    )
    header = ("rank", "batch size", "private", "public", "samples/s", "standalone", "waiting")
    return DataTable(header, rows).without_empty_columns()


def tabulate_faults(run: RunResults) -> DataTable:
    """Return what failed, when, and what that cost."""
    rows = [
        (
            f"{fault.time_s - run.series.start_s:.0f} s",
            fault.node,
            fault.what,
            "–" if fault.stopped_s is None else f"all ranks stopped for {format_seconds(fault.stopped_s)}",
        )
        for fault in run.series.faults
    ]
    return DataTable(("after", "node", "what", "cost"), tuple(rows))


@dataclass(frozen=True)
class ScalingPoint:
    """One run. Energy is of all machines."""

    run_id: str
    num_nodes: int
    """Number of nodes that train."""
    is_host_training: bool
    global_batch: int
    samples_per_s: float
    speedup: float | None
    efficiency: float | None
    joules_per_sample: float | None
    energy_origin: str | None
    """MEASURED, or STATED in fleet.yaml for a machine at least."""
    lost: tuple[str, ...]
    """Nodes that were lost on the way: the run had fewer for a part of it."""


@dataclass(frozen=True)
class ScalingSeries:
    """Runs by the number of nodes."""

    points: tuple[ScalingPoint, ...]
    kind: str
    """One of the texts of KINDS."""
    host_samples_per_s: float | None
    host_source: str
    """Runs without nodes, or tuning."""
    origin: str


def build_scaling(runs: Sequence[RunResults], kind: str) -> ScalingSeries:
    """Put runs of one job, each with another number of nodes, in order. `kind` is one of KINDS."""
    training = [{rank.node for rank in run.summary.ranks if rank.batch_size} for run in runs]
    alone = [
        run.summary.samples_per_s for run, nodes in zip(runs, training, strict=True) if nodes <= {HOST_NAME}
    ]
    tuned = [run.summary.host_samples_per_s for run in runs]
    host = next(filter(None, [*alone, *tuned]), None)
    points = []
    for summary, nodes in zip([run.summary for run in runs], training, strict=True):
        energy = summary.energy.whole if summary.energy else None
        points.append(
            ScalingPoint(
                summary.run_id,
                num_nodes=len(nodes - {HOST_NAME}),
                is_host_training=HOST_NAME in nodes,
                global_batch=summary.global_batch,
                samples_per_s=summary.samples_per_s,
                speedup=summary.samples_per_s / host if host else None,
                efficiency=summary.efficiency,
                joules_per_sample=energy.joules_per_sample if energy else None,
                energy_origin=energy.origin if energy else None,
                lost=summary.lost_nodes,
            )
        )
    return ScalingSeries(
        tuple(sorted(points, key=lambda point: point.num_nodes)),
        KINDS[kind],
        host,
        "runs without nodes" if alone else "the host's rate in tuning" if host else "",
        ", ".join(sorted({run.measured for run in runs})),
    )


def describe_scaling(scaling: ScalingSeries) -> str:
    """Return what the series is, in a sentence."""
    rate, host = format_rate(scaling.host_samples_per_s), ""
    if scaling.host_samples_per_s:
        host = f"; the host alone: {rate} samples/s, by {scaling.host_source}"
    fastest = max(scaling.points, key=lambda point: point.samples_per_s)
    if fastest.speedup:
        host += f"; fastest with {fastest.num_nodes} nodes: {fastest.speedup:.2f} × the host alone"
    return f"{len(scaling.points)} runs, {scaling.origin}; {scaling.kind}{host}"


def tabulate_scaling(scaling: ScalingSeries) -> DataTable:
    """Return a row for each run. `saved`: energy per image against the run without nodes, as in Table II."""
    without = next((point.joules_per_sample for point in scaling.points if not point.num_nodes), None)
    rows = [
        {
            "nodes": str(point.num_nodes),
            "run": point.run_id,
            "global batch": f"{point.global_batch:,}",
            "samples/s": format_rate(point.samples_per_s),
            "speed-up": "–" if point.speedup is None else f"{point.speedup:.2f}",
            "efficiency": format_share(point.efficiency),
            "J/image": f"{point.joules_per_sample:.4g}" if point.joules_per_sample else "–",
            "saved": format_share(1 - point.joules_per_sample / without)
            if point.joules_per_sample and without
            else "–",
            "remark": _remark(point),
        }
        for point in scaling.points
    ]
    table = DataTable(tuple(rows[0]), tuple(tuple(row.values()) for row in rows))
    return table.without_empty_columns()


def _remark(point: ScalingPoint) -> str:
    parts = [] if point.is_host_training else ["the host does not train"]
    if point.efficiency and point.efficiency > MAX_EFFICIENCY:
        parts.append(UNDER_LOAD)
    if point.lost:
        parts.append(f"lost during the run: {format_node_names(point.lost)}")
    if point.energy_origin == STATED:
        parts.append("energy as stated in fleet.yaml")
    return "; ".join(parts)
