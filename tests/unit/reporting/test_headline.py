"""The headline of a run: what held it back is named, or said to be nothing, and there is one thing to do."""

from dataclasses import replace
from typing import Any

import pytest

from csdctl.reporting.results import RunResults
from csdctl.reporting.tables import write_headline
from tests.unit.reporting.test_bottleneck import NODES, QUICK, SLOW, Spent, series
from tests.unit.reporting.test_summary import summary

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
    return RunResults(replace(base, **changes), series(*([of] * SECONDS for of in ranks)), {})


@pytest.mark.parametrize(
    ("ranks", "held_back", "next_step"),
    [
        ([QUICK, QUICK, SLOW], "csd1 (rank 2), compute", "Look for other programs on csd1"),
        ([QUICK, {**SLOW, "compute": 0.3, "input": 0.65}, QUICK], "csd0 (rank 1), input", "faster drive"),
        ([{**QUICK, "wait": 0.02, "communication": 0.6}] * 3, "link: communication", "Check the links"),
        ([BALANCED] * 3, "nothing: the ranks computed for 97% of the step time", "csdctl predict"),
    ],
)
def test_what_held_the_ranks_back_has_a_remedy(ranks: list[Spent], held_back: str, next_step: str) -> None:
    headline = write_headline(run(*ranks))
    assert headline["held back by"].startswith(held_back)
    assert next_step in headline["next"]


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
        ({"state": "failed", "failures": ("csd0: no space",)}, "Fix the failure, then resume"),
        ({"state": "failed"}, "See the logs"),
        ({"lost_nodes": (NODES[1],)}, "Check csd0 with `csdctl doctor`."),
        ({"predicted_samples_per_s": 200.0}, "44% of the predicted throughput"),
    ],
)
def test_next_step_follows_from_how_the_run_ended(changes: dict[str, Any], next_step: str) -> None:
    assert next_step in write_headline(run(BALANCED, BALANCED, BALANCED, **changes))["next"]


def test_run_that_is_under_way_is_followed_and_not_resumed() -> None:
    going = replace(run(BALANCED, BALANCED, BALANCED, state="failed"), is_running=True)
    headline = write_headline(going)
    assert headline["result"].startswith("running: 2 epochs")
    assert "runs watch" in headline["next"]
