"""Before training: the plan, the result of `verify`, and a forecast, as tables and as JSON."""

import math
from collections.abc import Iterator

from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import (
    format_bytes,
    format_count,
    format_joules,
    format_range,
    format_rate,
    format_seconds,
    format_share,
)
from csdctl.terminal.console import PrintableConsole, build_pairs, build_table
from csdctl.terminal.streams import Streams, document, fields_of
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT, Plan, RankPlan
from csdctl.tuning.scaling_curve import MIN_GAIN, MIN_SHARE_OF_NODE, CurvePoint, CurveVerdict, Reason
from csdctl.worker.protocol.run_spec import CPU
from csdctl.workflows.forecast.forecast import Forecast
from csdctl.workflows.train.verify import Verification

LEAVES = {
    DATA_PARALLEL: "sums of gradients",
    FEATURES: "sums of gradients of the head",
    SPLIT: "activations and labels of its samples, and sums of gradients",
}
"""Data that leaves a node, by strategy."""
FEATURES_LEAVE = "features of its public samples, once; the host trains alone"


def plan_document(plan: Plan, path: str) -> dict[str, object]:
    """Return the `csdctl.tune/1` document."""
    computed = ("global_batch", "predicted_samples_per_s", "predicted_range")
    return document("csdctl.tune/1", plan, path=path, **{name: getattr(plan, name) for name in computed})


def render_plan(console: PrintableConsole, plan: Plan, path: str) -> None:
    """Print the plan, its predicted throughput and time breakdown, and the path of its file."""
    title = f"plan for {plan.job} by {plan.method}" + (" (emulated fleet)" if plan.emulated else "")
    rows = [
        (
            str(number),
            rank.node,
            _show_batch_size(rank),
            _show_runtime(rank),
            format_seconds(rank.step_time_s),
            format_rate(rank.samples_per_s),
            format_bytes(rank.peak_memory_bytes),
        )
        for number, rank in enumerate(plan.ranks)
    ]
    numbers = (">batch size", ">threads", ">step", ">compute samples/s", ">peak memory")
    console.print(build_table((">rank", "node", *numbers), rows, title=title))
    for line in _describe_prediction(plan):
        console.print(line, soft_wrap=True)
    _render_strategies(console, plan)
    console.print(f"plan: {path}", soft_wrap=True)


def _render_strategies(console: PrintableConsole, plan: Plan) -> None:
    compared = {
        f"{strategy.strategy} {strategy.cut}".strip(): strategy
        for strategy in plan.strategies
        if strategy.first_run_s is not None
    }
    if len(compared) > 1:
        rows = [
            (
                strategy.strategy,
                strategy.cut,
                *map(format_seconds, (strategy.first_run_s, strategy.next_run_s, strategy.epoch_s)),
                format_bytes(strategy.sample_bytes),
            )
            for strategy in compared.values()
        ]
        styles = [
            "bold" if strategy.strategy == plan.strategy and plan.cut in ("", strategy.cut) else ""
            for strategy in compared.values()
        ]
        columns = ("strategy", "cut", ">first run", ">next", ">epoch", ">sent")
        console.print(build_table(columns, rows, title="strategies", styles=styles))
        tried = [name for name, strategy in compared.items() if strategy.is_confirmed]
        console.print(f"tried: {', '.join(tried) or 'none'}; forecast: the others", soft_wrap=True)
        ranges = {name: strategy.first_run_s_range or () for name, strategy in compared.items()}
        expected = [f"{name} {' to '.join(map(format_seconds, seconds))}" for name, seconds in ranges.items()]
        console.print(f"9 of 10 first runs are expected to take: {', '.join(expected)}", soft_wrap=True)
        cut = f" after {plan.cut}" if plan.cut else ""
        leaves = FEATURES_LEAVE if plan.trains_on_host else LEAVES[plan.strategy]
        console.print(f"strategy: {plan.strategy}{cut}; a node sends {leaves}", soft_wrap=True)
    if impossible := ", ".join(strategy.strategy for strategy in plan.strategies if strategy.why_not):
        console.print(f"not compared: {impossible} (`strategies` in the plan says why)", soft_wrap=True)


def _show_batch_size(rank: RankPlan) -> str:
    is_micro_batched = rank.micro_batch_size is not None and rank.micro_batch_size < rank.batch_size
    return f"{rank.batch_size}" + (f" (micro-batches of {rank.micro_batch_size})" if is_micro_batched else "")


def _show_runtime(rank: RankPlan) -> str:
    threads = f"{rank.threads} × {rank.inter_threads}" if rank.inter_threads > 1 else str(rank.threads)
    threads += "" if rank.onednn else ", no oneDNN"
    return threads if rank.device == CPU else f"{threads}, GPU"


def _describe_prediction(plan: Plan) -> Iterator[str]:
    predicted = plan.prediction
    rate = format_rate(plan.predicted_samples_per_s)
    measured = f"{plan.num_probes} probes" if plan.num_probes else "no probes: all from earlier measurements"
    measured += f", {format_seconds(plan.measuring_s)} of measuring"
    if predicted is None:
        reached = f"at most {rate} samples/s ({measured})" if plan.predicted_samples_per_s else "not measured"
        yield f"global batch size {plan.global_batch}, {reached}"
        return
    confirmed = "confirmed by a trial of all ranks" if predicted.is_confirmed else "not confirmed by a trial"
    yield f"global batch size {plan.global_batch}: {rate} samples/s, {confirmed} ({measured})"
    if rates := plan.predicted_range:
        yield f"9 of 10 runs are expected to reach {format_range(rates)} samples/s"
    yield (
        f"rank time: {format_share(predicted.compute_share)} computing, "
        f"{format_share(predicted.imbalance_share)} waiting for the slowest, "
        f"{format_share(predicted.communication_share)} communicating"
    )
    if plan.left_out:
        yield f"left out, because training is faster without them: {format_node_names(plan.left_out)}"


def show_verified(streams: Streams, verification: Verification, *, emulated: bool) -> None:
    """Print how much sum, gradients and weights differ, and how far Keras is from itself."""
    verified, nodes, verdict = verification.result, verification.nodes, verification.verdict
    sizes = dict(zip(nodes, verified.batch_sizes, strict=True))
    differences = dict(zip(nodes, verified.differences, strict=True))
    most = max(nodes, key=lambda node: (math.isnan(differences[node]), differences[node]))
    gradient = f"of {most} differs most from Keras', by {differences[most]:.1e}"
    compared_in = f"compared in {verified.compared_in}: rounding in {verified.dtype} hides a sample"
    pairs = [
        (
            "samples",
            f"{sum(verified.batch_sizes)}: {', '.join(f'{node} {size}' for node, size in sizes.items())}"
            + " (emulated fleet)" * emulated,
        ),
        (
            "sum",
            f"differs by {verified.sum_difference:.1e} from the ranks' gradients added in float64; "
            f"rounding explains {verified.sum_rounding:.1e}",
        ),
        ("gradient", gradient if differences[most] else "of every rank bit-identical with Keras'"),
        ("", f"rounding makes {verified.spread:.1e}; one sample makes {verified.one_sample:.1e}"),
        *([("", compared_in)] if verified.compared_in != verified.dtype else []),
        ("weights", f"bit-identical on all ranks ({verified.weights_hash[:16]}…)"),
        *([("result", verdict.text)] if verdict.is_equal else []),
    ]
    streams.console.print(build_pairs(pairs))
    content = document(
        "csdctl.verify/1",
        verified,
        without=("rank", "node", "differences", "batch_sizes"),  # "ranks" has them by name
        global_batch=sum(verified.batch_sizes),
        emulated=emulated,
        is_equal=verdict.is_equal,
        verdict=verdict.text,
        ranks={node: {"batch_size": size, "difference": differences[node]} for node, size in sizes.items()},
    )
    streams.result(content)


def show_forecast(streams: Streams, forecast: Forecast) -> None:
    """Print the curve, the verdict on the largest number of nodes, and where the figures come from."""
    basis, verdict, console = forecast.basis, forecast.verdict, streams.console
    if streams.is_json:
        streams.result(_build_document(forecast))
        return
    columns = [">nodes", ">samples/s", ">range", ">speed-up", ">efficiency", ">time"]
    if basis.power:
        columns += [">energy/\nsample", ">energy"]
    rows = [_cells(point, forecast) for point in forecast.points]
    if basis.power:  # 80 columns have no room for both range and efficiency
        dropped = 4 if any(point.samples_per_s_range for point in forecast.points) else 2
        for cells in (columns, *rows):
            del cells[dropped]
    console.print(build_table(columns, rows, title=f"{basis.title} ({basis.source} figures)"))
    if forecast.num_samples is None:
        console.print("time and energy of the job are unknown: set the samples per epoch with --samples")
    else:
        samples = f"{forecast.num_samples:,} samples in {format_count(basis.epochs, 'epoch')}"
        console.print(f"{samples}; time without start and evaluation")
    if basis.source == "emulated":
        no_verdict = "no verdict: nodes and host of an emulated fleet share the cores of one machine"
        console.print("\n".join([no_verdict, *_describe_idle(forecast)]), soft_wrap=True)
    elif verdict:
        style, negation = ("bold green", "") if not verdict.reasons else ("bold red", "NOT ")
        nodes = format_count(verdict.num_nodes, "node")
        console.print(f"{nodes}: {negation}worth it", style=style, soft_wrap=True)
        for sentence in [*_explain(forecast).values(), *_describe_idle(forecast), *_advise(verdict)]:
            console.print(f"  {sentence}", soft_wrap=True)
    for name, origin in basis.origins.items():
        console.print(f"{name.replace('_', ' ')}: {origin}", style="dim", soft_wrap=True)


def _build_document(forecast: Forecast) -> dict[str, object]:
    basis, verdict = forecast.basis, forecast.verdict
    reasons = [{"code": code, "text": text} for code, text in _explain(forecast).items()]
    return document(
        "csdctl.forecast/1",
        title=basis.title,
        source=basis.source,
        origins=dict(basis.origins),
        epochs=basis.epochs,
        num_samples=forecast.num_samples,
        power=basis.power,
        curve=[{**fields_of(point), **_predict_job(point, forecast)} for point in forecast.points],
        verdict=verdict and {**fields_of(verdict), "is_worth_it": not verdict.reasons, "reasons": reasons},
    )


def _cells(point: CurvePoint, forecast: Forecast) -> list[str]:
    job = _predict_job(point, forecast)
    cells = [
        str(point.num_nodes),
        format_rate(point.samples_per_s),
        format_range(point.samples_per_s_range) or "–",
        f"{point.speedup:.2f} ×",
        format_share(point.efficiency),
        format_seconds(job["time_s"]),
    ]
    if forecast.basis.power:
        cells += map(format_joules, (point.joules_per_image, job["energy_joules"]))
    return cells


def _predict_job(point: CurvePoint, forecast: Forecast) -> dict[str, float | None]:
    """Return time and energy of all epochs. None where the number of samples is not known."""
    count, per_sample = forecast.num_samples, point.joules_per_image
    if count is None:
        return {"time_s": None, "energy_joules": None}
    return {"time_s": count / point.samples_per_s, "energy_joules": per_sample and per_sample * count}


def _explain(forecast: Forecast) -> dict[Reason, str]:
    if not forecast.verdict:
        return {}
    point = forecast.points[-1]
    sentences = {
        Reason.SLOWER: f"no faster than the host alone: {point.speedup:.2f} ×",
        Reason.LITTLE_GAIN: f"only {point.speedup - 1:.1%} faster than the host alone "
        f"(less than {MIN_GAIN:.0%} is noise)",
        Reason.NO_ENERGY_SAVED: f"energy per sample is {format_joules(point.joules_per_image)}, "
        "no less than on the host alone",
    }
    return {reason: sentences[reason] for reason in forecast.verdict.reasons}


def _describe_idle(forecast: Forecast) -> list[str]:
    point, idle = forecast.points[-1], []
    if point.num_left_out:
        idle.append(f"{format_count(point.num_left_out, 'node')} left out: training is faster without them")
    if not point.is_host_training:
        idle.append("the host does not train: it only sums gradients and serves data to the nodes")
    return idle


def _advise(verdict: CurveVerdict) -> list[str]:
    advice = []
    if verdict.worth_from is None and verdict.num_nodes > 1:
        advice.append("fewer nodes are not worth it either")
    elif verdict.worth_from is not None:
        advice.append(f"worth it from {format_count(verdict.worth_from, 'node')}")
    if verdict.useful_nodes == 0:
        advice.append(f"no node adds {MIN_SHARE_OF_NODE:.0%} of its own throughput")
    elif verdict.useful_nodes < verdict.num_nodes:
        advice.append(
            f"beyond {format_count(verdict.useful_nodes, 'node')} each further node adds less than "
            f"{MIN_SHARE_OF_NODE:.0%} of its own throughput: the sum over the ranks, or waiting, takes the "
            "rest"
        )
    if verdict.least_energy_nodes is not None and verdict.least_energy_nodes < verdict.num_nodes:
        advice.append(f"lowest energy per sample with {format_count(verdict.least_energy_nodes, 'node')}")
    return advice
