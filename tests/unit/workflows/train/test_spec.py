"""What the spec of a run takes over from the job and the prepared data."""

from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.fleet.model import HOST_NAME
from csdctl.placement.equation1 import RankLoad, place_shards
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.worker.protocol.recipe import Noise
from csdctl.workflows.train.spec import build_spec
from tests.fake_session import FakeSession
from tests.unit.workflows.measured_project import PUBLIC, make_project, prepared, workspace

NAMES = (HOST_NAME, "csd0")


@pytest.mark.parametrize("noise", [None, Noise(1.0, 1.1, 1e-5)])
def test_ranks_add_the_noise_of_the_job(tmp_path: Path, noise: Noise | None) -> None:
    at = make_project(tmp_path)
    job, data = replace(at.job, noise=noise), prepared(at)
    data.private, data.validation = {"csd0": PUBLIC}, None
    ranks = [RankPlan(node=name, batch_size=10, threads=1) for name in NAMES]
    plan = Plan(job="job", job_fingerprint="", method="equal", ranks=ranks)
    placed = place_shards([RankLoad(HOST_NAME, 10, 0), RankLoad("csd0", 10, 3_000)], PUBLIC.num_samples)
    space = workspace(at, {name: FakeSession(name) for name in NAMES})
    shard = (data.worker, data.worker)
    spec = build_spec(at.project.new_run(), job, plan, placed, data, {"csd0": shard}, space)
    assert spec.noise == noise
    assert (spec.recipe, [rank.num_private for rank in spec.ranks]) == (data.recipe, [0, 3_000])
