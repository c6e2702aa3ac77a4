"""Tuning by fit where all is remembered: what becomes of its trial."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from csdctl.errors import OutOfMemoryError
from csdctl.transport.fake import FakeSession
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.tuning.search import Limits
from csdctl.workflows.tune import fit as tune_fit
from csdctl.workflows.tune.probing import ProbeRounds
from csdctl.workflows.tune.trial import TrialResult
from csdctl.workflows.tune.tune import TuneOptions
from tests.unit.workflows.measured_project import (
    STEPS,
    MeasuredProject,
    make_project,
    prepared,
    remember_all,
    workspace,
)

LIMITS = Limits(global_batch=160)
MAX_AT_ONCE = 100
"""More samples at once than these kill a rank, however little memory probes had seen."""


@pytest.fixture
def at(tmp_path: Path) -> MeasuredProject:
    at = make_project(tmp_path)
    remember_all(at)
    return at


def tune(at: MeasuredProject, trial: Callable[[Sequence[RankPlan]], TrialResult], said: list[str]) -> Plan:
    """A tune whose trials are `trial`."""
    sessions = {name: FakeSession(name) for name in at.fleet.machines}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProbeRounds, "prepare_trial", lambda *_: {})
        patch.setattr(tune_fit, "run_trial", lambda job, ranks, *_: trial(ranks))
        return tune_fit.tune_by_fit(
            at.job,
            prepared(at),
            workspace(at, sessions),
            TuneOptions(limits=LIMITS, is_exploring=False),
            said.append,
            lambda _: None,
        )


def tried(ranks: Sequence[RankPlan]) -> TrialResult:
    """What the machines reach that the project knows."""
    times = [STEPS.get(rank.node, STEPS["csd"]).at(rank.batch_size) for rank in ranks]
    step_s = max(times) + 0.02
    total = sum(rank.batch_size for rank in ranks)
    return TrialResult(5, step_s, total / step_s, tuple(times), 5 * step_s, "star", 0.02)


def test_rank_that_dies_of_memory_in_the_trial_computes_in_pieces_from_then_on(at: MeasuredProject) -> None:
    said: list[str] = []

    def trial(ranks: Sequence[RankPlan]) -> TrialResult:
        for rank in ranks:
            if min(rank.batch_size, rank.micro_batch_size or rank.batch_size) > MAX_AT_ONCE:
                raise OutOfMemoryError("killed", node=rank.node)
        return tried(ranks)

    plan = tune(at, trial, said)
    deaths = [line for line in said if "did not fit in memory beside the other ranks" in line]
    assert deaths
    for rank in plan.ranks:
        assert min(rank.batch_size, rank.micro_batch_size or rank.batch_size) <= MAX_AT_ONCE
    assert plan.global_batch == LIMITS.global_batch


def test_rank_that_dies_in_every_trial_ends_tuning(at: MeasuredProject) -> None:
    sizes: list[int] = []

    def trial(ranks: Sequence[RankPlan]) -> TrialResult:
        sizes.append(ranks[0].batch_size)
        raise OutOfMemoryError("killed", node=ranks[0].node)

    with pytest.raises(OutOfMemoryError):
        tune(at, trial, [])
    assert len(sizes) == 1 + tune_fit.MAX_DEATHS
