"""Every printed figure of a run, after any history, against a script that adds up its event log."""

import csv
import io
import json
import math
import re
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from csdctl.reporting.live_metrics import _Figures
from csdctl.reporting.numbers import format_rate, format_seconds
from csdctl.reporting.page import _speed_chart, render_page
from csdctl.reporting.results import RunResults, load_run_status, read_results
from csdctl.runs.directory import EventLog, ProjectDirectory, RunDirectory
from csdctl.terminal.report import render_report
from csdctl.terminal.run_view import TrainingView
from csdctl.terminal.streams import document, format_json
from csdctl.worker.protocol.events import Joined, event_document
from csdctl.workflows.reporting.report import render_csv
from tests.add_up_events import add_up
from tests.unit.reporting.scripted_history import NODES, History
from tests.unit.runs.manifests import manifest_of, spec_of, started_of
from tests.unit.terminal.test_run_view import terminal

NEAR = {"rel": 1e-4, "abs": 1e-4}
"""Times in events are rounded to microseconds."""


def write(history: History, directory: Path) -> RunDirectory:
    run = ProjectDirectory(directory).new_run()
    run.save_manifest(manifest_of(NODES))
    log = EventLog(run)
    for time_s, event in history.events:
        log.append(time_s, event)
    log.close()
    return run


@pytest.mark.first(20)
@pytest.mark.parametrize("seed", range(60))
def test_every_figure_equals_that_of_the_script(seed: int) -> None:
    history = History(Random(seed))
    with TemporaryDirectory() as directory:
        run = write(history, Path(directory))
        expected = add_up(run.events)
        assert (expected["steps"], expected["samples"]) == (history.total_steps, history.samples)
        results = read_results(run)
        check_report(results, expected)
        check_charts(results, expected)
        status = load_run_status(run).status
        assert status.samples_per_s == pytest.approx(expected["samples_per_s"], **NEAR)
        check_epoch_lines(history, expected)
        check_counters(history, expected)


@pytest.mark.first(15)
@pytest.mark.parametrize("seed", range(40))
def test_figures_of_a_run_that_goes_on_equal_those_of_the_script(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    history = History(random)
    first = next(n for n, (_, event) in enumerate(history.events) if isinstance(event, Joined))
    del history.events[random.randint(first + 1, len(history.events)) :]
    run = write(history, tmp_path)
    expected, summary = add_up(run.events), read_results(run).summary
    assert (summary.epochs, summary.steps, summary.samples) == tuple(
        expected[name] for name in ("epochs", "steps", "samples")
    )
    assert summary.samples_per_s == pytest.approx(expected["samples_per_s"] or 0.0, **NEAR)
    check_epoch_points(read_results(run), expected)


def check_report(results: RunResults, expected: dict[str, Any]) -> None:
    content = json.loads(format_json(document("csdctl.report/1", results.summary, path="")))
    for name in ("steps", "samples", "epochs"):
        assert content[name] == expected[name]
    for name in ("training_s", "samples_per_s"):
        assert content[name] == pytest.approx(expected[name], **NEAR)
    for rank, figures in expected["ranks"].items():
        for name in ("samples_per_s", "compute_s", "wait_s"):
            assert content["ranks"][rank][name] == pytest.approx(figures[name] or 0.0, **NEAR)
    console = terminal((200, 100))
    render_report(console, results)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    count = f"{expected['epochs']} epochs, {expected['steps']:,} steps of 16, {expected['samples']:,} samples"
    trained = f"{count} in {format_seconds(expected['training_s'])}"
    for place in (text, re.sub(r"<[^>]+>", " ", render_page([results]))):
        assert trained in place
        assert f"{format_rate(expected['samples_per_s'])} samples/s" in place


def check_epoch_points(results: RunResults, expected: dict[str, Any]) -> None:
    assert [point.epoch for point in results.series.epochs] == [*expected["by_epoch"]]
    rows = list(csv.DictReader(io.StringIO(render_csv([results]))))
    for row, of_epoch in zip(rows, expected["by_epoch"].values(), strict=True):
        rate = float(row["samples_per_s"] or "nan")  # nan: no step was reported
        expected_rate = of_epoch["samples_per_s"] or math.nan
        assert rate == pytest.approx(expected_rate, rel=1e-3, nan_ok=True)


def check_charts(results: RunResults, expected: dict[str, Any]) -> None:
    series = results.series
    check_epoch_points(results, expected)
    pairs = zip(series.throughputs(), series.step_s(0), strict=True)
    rates = [(rate, seconds) for rate, seconds in pairs if rate is not None]
    mean = sum(rate * seconds for rate, seconds in rates) / sum(seconds for _, seconds in rates)
    assert mean == pytest.approx(expected["samples_per_s"], **NEAR)
    assert [row[2] for row in _speed_chart([results]).data.rows] == [format_rate(rate) for rate, _ in rates]
    for rank, figures in expected["ranks"].items():
        assert sum(series.samples[rank]) == pytest.approx(figures["samples"])
        assert sum(series.step_s(rank)) == pytest.approx(figures["compute_s"] + figures["wait_s"], **NEAR)


def check_epoch_lines(history: History, expected: dict[str, Any]) -> None:
    """Lines of a csdctl that watches from the beginning, and of a csdctl that has resumed the run."""
    resumed = max(n for n, (_, event) in enumerate(history.events) if isinstance(event, Joined))
    for first in (0, resumed):
        console = terminal((200, 24), is_terminal=False)
        past = [event for _, event in history.events[:first]]
        started = started_of(spec_of(NODES, history.epochs), 9, past=past)
        view = TrainingView(console, started, clock=lambda: 0.0)
        for _, event in history.events[first:]:
            view.show(event)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        latest = {int(line.split()[1].partition("/")[0]): line for line in lines if line.startswith("epoch ")}
        assert latest or first
        for epoch, line in latest.items():
            figures = expected["by_epoch"][epoch]
            rate, seconds = format_rate(figures["samples_per_s"]), format_seconds(figures["seconds"])
            assert line.endswith(f"{rate} samples/s in {seconds}")


def check_counters(history: History, expected: dict[str, Any]) -> None:
    """As a Prometheus that reads at the end of the run sees them."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    metrics = _Figures(registry)
    for time_s, event in history.events:
        metrics({"run": "run", "time": time_s, **event_document(event)})
    for rank, figures in expected["ranks"].items():
        counted = registry.get_sample_value("csdctl_samples_total", {"node": NODES[rank]})
        assert counted == pytest.approx(figures["samples"])
        waited = registry.get_sample_value("csdctl_wait_seconds_total", {"node": NODES[rank]})
        assert waited == pytest.approx(figures["wait_s"], **NEAR)


def test_histories_have_every_kind_of_break() -> None:
    drawn = [History(Random(seed)) for seed in range(40)]
    kinds = {type(event).__name__ for history in drawn for _, event in history.events}
    assert {"NodeLost", "NodeBack", "Rebalanced", "Ready"} <= kinds
    assert sum(history.sessions for history in drawn) > 2 * len(drawn)
