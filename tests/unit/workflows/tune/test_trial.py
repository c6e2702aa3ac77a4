"""What the ranks of a trial are asked for, and its result, from their events."""

from dataclasses import replace

import pytest

from csdctl.errors import RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import EpochEnd, Event, Joined, Progress
from csdctl.worker.protocol.recipe import Noise
from csdctl.workflows.tune.probing import _build_spec, read_trial
from tests.fake_session import FakeSession
from tests.unit.workflows.measured_project import PUBLIC, MeasuredProject, prepared, run_context, workspace

NODES = ("host", "csd0")


def joined(rank: int, generation: int = 1) -> Joined:
    return Joined(rank, NODES[rank], generation, 1, 0, 20, 0, {"0": 30, "1": 10}, "star", 0.02)


def first_progress(rank: int) -> Progress:
    """Two slow steps."""
    return Progress(rank, NODES[rank], 1, 2, 2, 60, 1.0, 0.5, 1.5, 80 if rank == 0 else 0)


def epoch_end(rank: int, steps: int = 20) -> EpochEnd:
    """After the first two, steps of 0.1 s: the host computes for 0.09 s of it, the node for 0.08 s."""
    later = steps - 2
    compute_s = 1.0 + later * (0.09 if rank == 0 else 0.08)
    wait_s = 0.5 + later * (0.01 if rank == 0 else 0.02)
    samples = 40 * steps if rank == 0 else 0
    return EpochEnd(
        rank, NODES[rank], 1, steps, 0, compute_s, wait_s, 9.0, "", samples, stepped_samples=samples
    )


def test_first_steps_of_many_do_not_count() -> None:
    events: list[Event] = [
        *(joined(rank) for rank in (0, 1)),
        *(first_progress(rank) for rank in (0, 1)),
        *(epoch_end(rank) for rank in (0, 1)),
    ]
    result = read_trial(events, NODES)
    assert (result.num_steps, result.step_s) == (18, pytest.approx(0.1))
    assert result.samples_per_s == pytest.approx(400)
    assert result.compute_s == pytest.approx((0.09, 0.08))
    assert (result.wall_s, result.collective, result.sum_s) == (9.0, "star", 0.02)


def test_few_steps_all_count() -> None:
    events: list[Event] = [joined(0), joined(1), first_progress(0), epoch_end(0, 9), epoch_end(1, 9)]
    assert read_trial(events, NODES).num_steps == 9


def test_trial_that_lost_its_links_is_an_error() -> None:
    events: list[Event] = [joined(0), joined(1), joined(0, 2), joined(1, 2), epoch_end(0), epoch_end(1)]
    with pytest.raises(RunError, match="lost its links"):
        read_trial(events, NODES)


@pytest.mark.parametrize(
    "of_node",
    [
        [],
        [first_progress(1), epoch_end(1, 19)],
        [first_progress(1), replace(epoch_end(1), steps=0)],
        [first_progress(1), replace(epoch_end(1), compute_s=0.0)],
        [replace(first_progress(1), steps=21), epoch_end(1)],
        [replace(first_progress(1), compute_s=99.0), epoch_end(1)],
    ],
)
def test_node_with_missing_or_impossible_steps_is_named(of_node: list[Event]) -> None:
    with pytest.raises(RunError, match="before csd0 had done all steps"):
        read_trial([joined(0), joined(1), *of_node[:1], epoch_end(0), *of_node[1:]], NODES)


@pytest.mark.parametrize("noise", [None, Noise(1.0, 1.1, 1e-5)])
def test_trial_adds_the_noise_of_the_job_to_its_private_share(
    at: MeasuredProject, noise: Noise | None
) -> None:
    data = prepared(at)
    data.private, data.num_private = {"csd0": PUBLIC}, {"csd0": 3_000}
    ranks = [RankPlan(node=name, batch_size=10, threads=1) for name in (HOST_NAME, "csd0")]
    space = workspace(at, {rank.node: FakeSession(rank.node) for rank in ranks})
    context = run_context(replace(at, job=replace(at.job, noise=noise)), space, data)
    spec = _build_spec(at.project.new_scratch(), ranks, context, 20, None)
    assert spec.noise == noise
    host, csd0 = spec.ranks
    assert host.num_private == 0 < csd0.num_private
    assert csd0.num_private + csd0.num_public == 200
