"""Rendered reports, plans and live views: what they must contain, not their exact wording."""

import json
import math
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

from csdctl.reporting.results import RunResults, RunSummary
from csdctl.reporting.series import RunSeries
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.report import render_report
from csdctl.terminal.run_view import TrainingView
from csdctl.terminal.streams import Streams, document, format_json
from csdctl.terminal.tune import render_plan, show_verified
from csdctl.tuning.plan import StrategyPlan
from csdctl.worker.protocol.events import (
    CheckpointSaved,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    NodeLost,
    Progress,
    Ready,
    Rebalanced,
    Verified,
)
from csdctl.workflows.train.verify import Verification
from tests.json_page import check_document
from tests.unit.reporting.test_results import NODES, summary
from tests.unit.runs.manifests import spec_of, started_of
from tests.unit.tuning.test_plan import PLAN

SUMMARY = replace(summary(), metrics={"auc": 0.9375}, validation_metrics={"auc": 0.875})


def console() -> tuple[PrintableConsole, StringIO]:
    file = StringIO()
    return PrintableConsole(file=file, width=100), file


def report(summary: RunSummary) -> str:
    to, file = console()
    render_report(to, RunResults(summary, RunSeries(NODES), {}))
    return file.getvalue()


def row(text: str, node: str) -> list[str]:
    """Return the words in the row of `node`."""
    return re.findall(r"[^\s│┃|]+", next(line for line in text.splitlines() if f" {node} " in line))


def test_rank_whose_gradient_is_nan_differs_most_from_keras() -> None:
    nodes, file = ("host", "csd0", "csd1"), StringIO()
    differences = 0.0, math.nan, 1e-7
    verified = Verified(0, "host", (8, 6, 8), "float32", 0.0, 1e-7, "float32", differences, 1e-7, 0.1, "hash")
    streams = Streams(stdout=file, stderr=StringIO())
    show_verified(streams, Verification(nodes, verified), emulated=False)
    assert "of csd0 differs most from Keras', by nan" in file.getvalue()


class TestReport:
    def test_every_rank_has_a_row(self) -> None:
        assert row(report(SUMMARY), "csd0") == ["1", "csd0", "10", "40", "60", "10.0", "15.0", "10%"]

    @pytest.mark.parametrize(
        ("changes", "present", "absent"),
        [
            ({}, ["emulated", "89%", "0.6000", "1.0000", "identical"], []),
            ({"emulated": False}, [], ["emulated"]),
            ({"identical_weights": False}, [], ["identical"]),
            ({"efficiency": None, "alone_samples_per_s": None, "method": "equal"}, ["unknown", "equal"], []),
            (
                {"accuracy": None, "validation_accuracy": None},
                ["auc         0.8750 validation, 0.9375 training"],
                ["accuracy"],
            ),
            ({"state": "failed", "failures": ("csd0: [red] is no colour here",)}, ["csd0: [red] is no"], []),
        ],
    )
    def test_what_is_known_is_shown(
        self, changes: dict[str, Any], present: list[str], absent: list[str]
    ) -> None:
        text = report(replace(SUMMARY, **changes))
        assert [word for word in present if word not in text] == []
        assert [word for word in absent if word in text] == []

    def test_document_is_json_with_a_schema(self) -> None:
        content = json.loads(format_json(document("csdctl.report/1", SUMMARY, path="/project/run")))
        check_document(content)
        assert (content["path"], content["emulated"]) == ("/project/run", True)
        assert [rank["node"] for rank in content["ranks"]] == [*NODES]
        assert content["ranks"][1]["waiting"] == pytest.approx(0.1)


SPEC = spec_of(epochs=2)
READY = [Ready(0, "host", 600), Ready(1, "csd0", 100)]
PROGRESS = Progress(0, "host", 1, 5, 5, 300, 3.0, 1.5, 5.0, 350, 2.0, 0.4)
EPOCH_END = EpochEnd(0, "host", 1, 10, 600, 6.0, 3.0, 10.0, "hash", 700, 1.5, 0.55)
EVENTS: list[Event] = [
    *READY,
    PROGRESS,
    replace(PROGRESS, rank=1, node="csd0", global_samples=0, loss=None, accuracy=None),
    EPOCH_END,
    replace(EPOCH_END, rank=1, node="csd0", global_samples=0, loss=None, accuracy=None),
    CheckpointSaved(0, "host", 1, 10, "checkpoints/step-00000010.npz"),
    Failed(1, "csd0", "gone"),
    Finished(0, "host", 2, 20, "hash", 1),
]


def lines_of(*events: Event) -> list[str]:
    to, file = console()
    with TrainingView(to, started_of(SPEC, 10, emulated=True)) as view:
        for event in events:
            view.show(event)
    return file.getvalue().splitlines()


class TestViewWithoutATerminal:
    @pytest.mark.parametrize(
        ("events", "expected"),
        [
            ([*READY, EPOCH_END], ["epoch 1/2", "1.5000", "0.5500", "77.8 samples/s", "10.0 s"]),
            (
                [replace(EPOCH_END, validation_loss=1.75, validation_accuracy=0.5125)],
                ["validation loss 1.7500", "0.5125"],
            ),
            (
                [*READY, Rebalanced(0, "host", 1, 7, "csd0", 1.84, {"0": 65, "1": 5})],
                ["csd0 took 1.84 times", "step 8", "host 65", "csd0 5"],
            ),
            ([NodeLost(1, "csd0", "killed")], ["csd0", "killed"]),
            (
                [PROGRESS, Joined(0, "host", 1, 6, 12, 6, {"0": 60}, num_lost=100)],
                ["1 ranks", "epoch 1, step 6", "global batch 60", "100 private samples"],
            ),
        ],
    )
    def test_event_is_one_plain_line(self, events: list[Event], expected: list[str]) -> None:
        (line,) = lines_of(*events)
        assert [word for word in expected if word not in line] == []
        assert "\x1b" not in line

    def test_only_rank_0_reports_epochs_and_progress_does_not_flood_a_log(self) -> None:
        assert lines_of(replace(EPOCH_END, rank=1, node="csd0", loss=None)) == []
        assert "validation" not in "".join(lines_of(EPOCH_END))
        assert len(lines_of(*READY, *[PROGRESS] * 100)) <= 2


def test_plan_that_was_edited_is_not_shown_as_confirmed() -> None:
    for size in (315, 300):
        ranks = [replace(PLAN.ranks[0], batch_size=size), *PLAN.ranks[1:]]
        console = PrintableConsole(file=(printed := StringIO()), width=200)
        render_plan(console, PLAN.model_copy(update={"ranks": ranks}), "plan.yaml")
        assert ("confirmed by a trial" in printed.getvalue()) == (size == 315)


def test_strategies_are_shown_with_the_range_of_their_first_runs() -> None:
    figures = {"next_run_s": 40.0, "epoch_s": 4.0, "sample_bytes": 1000.0}
    strategies = [
        StrategyPlan(strategy="data-parallel", first_run_s=50.0, first_run_s_range=(40.0, 62.0), **figures),
        StrategyPlan(
            strategy="split", cut="block", first_run_s=45.0, first_run_s_range=(32.0, 58.0), **figures
        ),
    ]
    console = PrintableConsole(file=(printed := StringIO()), width=200)
    render_plan(console, PLAN.model_copy(update={"strategies": strategies}), "plan.yaml")
    expected = "are expected to take: data-parallel 40.0 s to 62.0 s, split block 32.0 s to 58.0 s\n"
    assert expected in printed.getvalue()
