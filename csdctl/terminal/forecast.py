"""A forecast as a table with its verdict, and as JSON."""

from csdctl.reporting.numbers import (
    format_count,
    format_joules,
    format_range,
    format_rate,
    format_seconds,
    format_share,
)
from csdctl.terminal.console import build_table
from csdctl.terminal.streams import Streams, document, fields_of
from csdctl.tuning.scaling_curve import MIN_GAIN, MIN_SHARE_OF_NODE, CurvePoint, CurveVerdict, Reason
from csdctl.workflows.forecast.forecast import Forecast


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
        style, negation = ("bold green", "") if verdict.is_worth_it else ("bold red", "NOT ")
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
        verdict=verdict and {**fields_of(verdict), "is_worth_it": verdict.is_worth_it, "reasons": reasons},
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
    """Return a sentence for each reason, with its figures."""
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
    """Return sentences about ranks that do not train with the largest number of nodes."""
    point, idle = forecast.points[-1], []
    if point.num_left_out:
        idle.append(f"{format_count(point.num_left_out, 'node')} left out: training is faster without them")
    if not point.is_host_training:
        idle.append("the host does not train: it only sums gradients and serves data to the nodes")
    return idle


def _advise(verdict: CurveVerdict) -> list[str]:
    """Return sentences about fewer nodes."""
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
