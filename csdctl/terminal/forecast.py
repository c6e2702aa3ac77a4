"""A forecast as a table with its verdict, and as JSON."""

from typing import Any

from csdctl.reporting.numbers import format_joules, format_range, format_rate, format_seconds, format_share
from csdctl.terminal.console import PrintableConsole, build_table
from csdctl.tuning.scaling_curve import MIN_GAIN, MIN_SHARE_OF_NODE, CurvePoint, Reason, Verdict
from csdctl.workflows.forecast.forecast import Forecast


def render_forecast(console: PrintableConsole, forecast: Forecast) -> None:
    """Print the curve, the verdict on the largest number of nodes, and where the figures come from."""
    basis = forecast.basis
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
        samples = f"{forecast.num_samples:,} samples in {basis.epochs:,} epoch{'s' * (basis.epochs != 1)}"
        console.print(f"{samples}; time without start and evaluation")
    if basis.source == "emulated":
        no_verdict = "no verdict: nodes and host of an emulated fleet share the cores of one machine"
        console.print("\n".join([no_verdict, *_idle(forecast)]), soft_wrap=True)
    elif forecast.verdict:
        style, verdict = ("bold green", "") if forecast.verdict.is_worth_it else ("bold red", "NOT ")
        headline = f"{_nodes(forecast.verdict.num_nodes)}: {verdict}worth it"
        console.print(headline, style=style, soft_wrap=True)
        for sentence in [*_reasons(forecast).values(), *_idle(forecast), *_advice(forecast.verdict)]:
            console.print(f"  {sentence}", soft_wrap=True)
    for name, origin in basis.origins.items():
        console.print(f"{name.replace('_', ' ')}: {origin}", style="dim", soft_wrap=True)


def forecast_document(forecast: Forecast) -> dict[str, Any]:
    """Return the `csdctl.forecast/1` document."""
    basis, verdict = forecast.basis, forecast.verdict
    return {
        "schema": "csdctl.forecast/1",
        "title": basis.title,
        "source": basis.source,
        "origins": dict(basis.origins),
        "epochs": basis.epochs,
        "num_samples": forecast.num_samples,
        "power": basis.power,
        "curve": [{**vars(point), **_of_the_job(point, forecast)} for point in forecast.points],
        "verdict": verdict
        and {
            **vars(verdict),
            "is_worth_it": verdict.is_worth_it,
            "reasons": [{"code": code, "text": text} for code, text in _reasons(forecast).items()],
        },
    }


def _cells(point: CurvePoint, forecast: Forecast) -> list[str]:
    of_the_job = _of_the_job(point, forecast)
    cells = [
        str(point.num_nodes),
        format_rate(point.samples_per_s),
        format_range(point.samples_per_s_range) or "–",
        f"{point.speedup:.2f} ×",
        format_share(point.efficiency),
        format_seconds(of_the_job["time_s"]),
    ]
    if forecast.basis.power:
        cells += map(format_joules, (point.joules_per_image, of_the_job["energy_joules"]))
    return cells


def _of_the_job(point: CurvePoint, forecast: Forecast) -> dict[str, float | None]:
    count, per_sample = forecast.num_samples, point.joules_per_image
    if count is None:
        return {"time_s": None, "energy_joules": None}
    return {"time_s": count / point.samples_per_s, "energy_joules": per_sample and per_sample * count}


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number:,} nodes"


def _reasons(forecast: Forecast) -> dict[Reason, str]:
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


def _idle(forecast: Forecast) -> list[str]:
    """Return sentences about ranks that do not train with the largest number of nodes."""
    point, idle = forecast.points[-1], []
    if point.num_left_out:
        idle.append(f"{_nodes(point.num_left_out)} left out: training is faster without them")
    if not point.is_host_training:
        idle.append("the host does not train: it only sums gradients and serves data to the nodes")
    return idle


def _advice(verdict: Verdict) -> list[str]:
    """Return sentences about fewer nodes."""
    advice = []
    if verdict.worth_from is None and verdict.num_nodes > 1:
        advice.append("fewer nodes are not worth it either")
    elif verdict.worth_from is not None:
        advice.append(f"worth it from {_nodes(verdict.worth_from)}")
    if verdict.useful_nodes == 0:
        advice.append(f"no node adds {MIN_SHARE_OF_NODE:.0%} of its own throughput")
    elif verdict.useful_nodes < verdict.num_nodes:
        advice.append(
            f"beyond {_nodes(verdict.useful_nodes)} each further node adds less than {MIN_SHARE_OF_NODE:.0%} "
            "of its own throughput: the sum over the ranks, or waiting, takes the rest"
        )
    if verdict.least_energy_nodes is not None and verdict.least_energy_nodes < verdict.num_nodes:
        advice.append(f"lowest energy per sample with {_nodes(verdict.least_energy_nodes)}")
    return advice
