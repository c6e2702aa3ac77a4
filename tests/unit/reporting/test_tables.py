"""The headline of a run, and the comparison of runs with different numbers of nodes."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from csdctl.reporting.energy import MachineEnergy, RunEnergy
from csdctl.reporting.results import RankSummary, RunResults
from csdctl.reporting.tables import KINDS, build_scaling, tabulate_scaling, write_headline
from tests.unit.reporting.test_page import results
from tests.unit.reporting.test_results import MANIFEST, summary
from tests.unit.reporting.test_series import QUICK, SLOW, Spent, series_of

SECONDS = 40
BALANCED: Spent = {"compute": 0.97, "input": 0.0, "wait": 0.02, "communication": 0.01, "other": 0.0}
TURNS: Spent = {"compute": 0.85, "input": 0.0, "wait": 0.1, "communication": 0.05, "other": 0.0}


def run(*ranks: Spent, **changes: Any) -> RunResults:
    """A run of SECONDS in which the ranks spent their time so."""
    base = summary()
    spent = tuple(
        replace(
            rank,
            compute_s=SECONDS * (of["compute"] + of["input"]),
            wait_s=SECONDS * (of["wait"] + of["communication"]),
        )
        for rank, of in zip(base.ranks, ranks, strict=True)
    )
    changes = {"predicted_samples_per_s": None, "ranks": spent} | changes
    return RunResults(replace(base, **changes), series_of(*([of] * SECONDS for of in ranks)), MANIFEST)


@pytest.mark.parametrize(
    ("ranks", "held_back", "next_step"),
    [
        ([QUICK, QUICK, SLOW], "csd1 (rank 2), compute", "look for other programs there"),
        ([QUICK, {**SLOW, "compute": 0.3, "input": 0.65}, QUICK], "csd0 (rank 1), input", "faster drive"),
        ([{**QUICK, "wait": 0.02, "communication": 0.6}] * 3, "link: sums took", "Use larger batches"),
        ([BALANCED] * 3, "nothing: the ranks computed for 97% of the step time", "csdctl predict"),
    ],
)
def test_what_held_the_ranks_back_has_a_remedy(ranks: list[Spent], held_back: str, next_step: str) -> None:
    headline = write_headline(run(*ranks, emulated=False))
    assert headline["held back by"].startswith(held_back)
    assert next_step in headline["next"]


def test_slow_rank_of_a_run_as_it_was_planned_is_named_and_the_plan_is_kept() -> None:
    planned = {"predicted_samples_per_s": 90.0, "predicted_range": (80.0, 100.0)}
    headline = write_headline(run(QUICK, QUICK, SLOW, **planned))
    assert headline["held back by"].startswith("csd1 (rank 2), compute")
    assert "csdctl predict" in headline["next"]
    later = {"predicted_samples_per_s": 95.0, "predicted_range": (92.0, 98.0)}
    assert "Measure again" in write_headline(run(QUICK, QUICK, SLOW, **later))["next"]


def test_waiting_that_no_rank_caused_or_whose_cause_was_not_recorded_is_not_called_nothing() -> None:
    waiting = run(TURNS, TURNS, TURNS)
    assert write_headline(waiting)["held back by"] == (
        "waiting, 15% of the step time (10% for slower ranks, 5% in communication); no single rank caused it"
    )
    undivided = replace(waiting, series=replace(waiting.series, is_wait_divided=False))
    assert "15% of the step time; the run did not record" in write_headline(undivided)["held back by"]


def test_evaluation_that_takes_long_is_named() -> None:
    long = {**BALANCED, "other": 0.5}
    assert (
        "evaluation and checkpoints took 33% of the run"
        in write_headline(run(long, long, long))["held back by"]
    )


@pytest.mark.parametrize(
    ("changes", "next_step"),
    [
        ({"state": "stopped"}, "Resume: `csdctl train --resume 20260101-000000-abcd`."),
        ({"state": "failed", "failures": ("csd0: no space",)}, "Fix the failure (see the logs), then"),
        ({"state": "failed"}, "Fix the failure (see the logs)"),
        ({"lost_nodes": ("csd0",)}, "Check csd0 with `csdctl doctor`."),
        ({"method": "equal"}, "Use a plan (`csdctl tune`) instead of --batch-size."),
        ({"predicted_samples_per_s": 200.0}, "44% of the predicted throughput"),
        (
            {"predicted_samples_per_s": 95.0, "predicted_range": (92.0, 98.0)},
            "94% of the predicted throughput",
        ),
        ({"predicted_samples_per_s": 200.0, "predicted_range": (80.0, 500.0)}, "csdctl predict"),
    ],
)
def test_next_step_follows_from_how_the_run_ended(changes: dict[str, Any], next_step: str) -> None:
    assert next_step in write_headline(run(BALANCED, BALANCED, BALANCED, **changes))["next"]


def test_run_that_is_under_way_is_followed_and_not_resumed() -> None:
    headline = write_headline(run(BALANCED, BALANCED, BALANCED, state="running"))
    assert headline["result"].startswith("running: 2 epochs")
    assert "runs watch" in headline["next"]


HOST, NODE = 30.0, 3.0
"""Samples per second alone, as MobileNetV2 in Table I."""
ENERGY = {0: 13.1, 4: 8.3, 24: 4.02}
"""Joules per image of Table II."""


def run_on(num_nodes, *, batch=None, tuned=True, joules=None):
    """A run_on whose ranks reach 90% of what they reach alone, as soon as there are nodes."""
    alone = [HOST] + [NODE] * num_nodes
    rate = sum(alone) * (0.9 if num_nodes else 1.0)
    ranks = tuple(
        RankSummary(
            number,
            f"csd{number - 1}" if number else "host",
            batch or (100 if number == 0 else 10),
            num_private=0,
            num_public=0,
            samples_per_s=0.0,
            alone_samples_per_s=rate_alone if tuned else None,
            compute_s=0.0,
            wait_s=0.0,
        )
        for number, rate_alone in enumerate(alone)
    )
    energy = None
    if joules:
        whole = MachineEnergy("whole", "command", "measured", 100.0, joules * rate * 100, 100.0)
        whole.samples = round(rate * 100)
        energy = RunEnergy((whole,), whole, ())
    base = results(f"20260101-00000{num_nodes % 10}-{num_nodes}")
    summary = dataclasses.replace(
        base.summary,
        ranks=ranks,
        samples_per_s=rate,
        efficiency=rate / sum(alone) if tuned else None,
        global_batch=sum(rank.batch_size for rank in ranks),
        energy=energy,
        lost_nodes=(),
    )
    return dataclasses.replace(base, summary=summary)


class TestScaling:
    def test_speedup_is_over_the_run_without_nodes(self):
        series = build_scaling([run_on(24), run_on(0), run_on(4)], "weak")
        assert [point.num_nodes for point in series.points] == [0, 4, 24]
        assert [round(point.speedup, 3) for point in series.points] == [1.0, 1.26, 3.06]
        assert [round(point.efficiency, 3) for point in series.points] == [1.0, 0.9, 0.9]
        assert (series.host_source, series.kind) == ("runs without nodes", KINDS["weak"])

    def test_energy_is_saved_as_in_table_2_of_the_paper(self):
        table = tabulate_scaling(build_scaling([run_on(n, joules=e) for n, e in ENERGY.items()], "weak"))
        columns = [table.header.index(name) for name in ("nodes", "J/image", "saved")]
        rows = [tuple(row[column] for column in columns) for row in table.rows]
        assert rows == [("0", "13.1", "0%"), ("4", "8.3", "37%"), ("24", "4.02", "69%")]
