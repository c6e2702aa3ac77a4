"""A run as text for the textfile collector of Prometheus' node_exporter.

Format: Prometheus' text-based exposition format, version 0.0.4.
"""

from collections.abc import Iterable, Mapping

from csdctl.reporting.results import RunResults

Samples = Iterable[tuple[Mapping[str, str], float]]


def render_prometheus(run: RunResults) -> str:
    """Return the latest numbers of a run as gauges and counters."""
    summary, series = run.summary, run.series
    whole = {"run": summary.run_id, "source": run.measured}
    of_rank = [{**whole, "rank": str(rank.rank), "node": rank.node} for rank in summary.ranks]
    ranks = list(zip(of_rank, summary.ranks, strict=True))
    last = series.epochs[-1].results if series.epochs else {}
    is_ended = {state: float(summary.state == state) for state in ("done", "stopped", "failed")}
    seconds = [
        ({**labels, "kind": kind}, sum(values))
        for labels, spent in zip(of_rank, series.spent_s, strict=True)
        for kind, values in spent.items()
    ]
    flows: dict[str, int] = {}
    for flow in run.flows:
        flows[flow.kind] = flows.get(flow.kind, 0) + flow.num_bytes
    families: list[tuple[str, str, str, Samples]] = [
        ("run_state", "gauge", "1 for the state of the run.", _each(whole, "state", is_ended)),
        ("run_epochs", "gauge", "Epochs that have ended.", [(whole, summary.epochs)]),
        ("run_samples_total", "counter", "Samples trained on by all ranks.", [(whole, summary.samples)]),
        ("run_samples_per_second", "gauge", "Over whole epochs.", [(whole, summary.samples_per_s)]),
        ("run_result", "gauge", "Loss and metrics of the latest epoch.", _each(whole, "name", last)),
        ("run_lost_nodes", "gauge", "Nodes that were lost.", [(whole, len(summary.lost_nodes))]),
        ("run_sent_bytes_total", "counter", "Bytes sent, by class.", _each(whole, "class", flows)),
        ("rank_batch_size", "gauge", "Of the plan.", [(labels, r.batch_size) for labels, r in ranks]),
        (
            "rank_samples_per_second",
            "gauge",
            "In the run.",
            [(labels, r.samples_per_s) for labels, r in ranks],
        ),
        ("rank_seconds_total", "counter", "What a rank spent its time on.", seconds),
        (
            "rank_cpu_seconds_total",
            "counter",
            "CPU time of a rank's process.",
            [(of_rank[rank], cpu_s) for rank, cpu_s in series.cpu_s.items()],
        ),
    ]
    return "".join(_family(*family) for family in families)


def _each(labels: Mapping[str, str], name: str, values: Mapping[str, float]) -> Samples:
    """Return a sample for each value, named by the label `name`."""
    return [({**labels, name: key}, value) for key, value in values.items()]


def _family(name: str, kind: str, text: str, samples: Samples) -> str:
    lines = [f"csdctl_{name}{{{_labels(labels)}}} {float(value)!r}" for labels, value in samples]
    if not lines:
        return ""
    return "\n".join([f"# HELP csdctl_{name} {text}", f"# TYPE csdctl_{name} {kind}", *lines, ""])


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
