"""The shards of a plan's ranks, and what each rank reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.job.model import Job, PrivateData
from csdctl.shipping.store import StoredFile
from csdctl.transport.meter import TrafficClass
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.run_spec import DatasetSlice, Runtime
from csdctl.workflows.data.files import SerializedModel
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.resolved import build_rank_specs, place_plan, with_servers
from tests.unit.workflows.measured_project import write_job

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")), path=Path("fleet.yaml"))
PLAN = Plan(
    job="job",
    job_fingerprint="",
    method="equal",
    ranks=[RankPlan(node=name, batch_size=10, threads=4) for name in (HOST_NAME, "csd0", "csd1")],
)
FILE = StoredFile("ab" * 32 + ".npy", Path("file"), 0, traffic_class=TrafficClass.PUBLIC)
MODEL = SerializedModel(ModelInfo("m", {"": (4, 4, 1)}, 7, 7), FILE, FILE)
HASHES = {"images_sha256": "cd" * 32, "labels_sha256": "ef" * 32}
PUBLIC = DatasetInfo("data/public", 100, (4, 4, 1), "uint8", (), 9, "public", **HASHES)
PRIVATE = DatasetInfo("data/private", 20, (4, 4, 1), "uint8", (), 9, "private", **HASHES)
PREPARED = Prepared(FILE, MODEL, PUBLIC, None, {"csd0": PRIVATE})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = write_job(tmp_path, is_private=True)
    return replace(job, recipe=replace(job.recipe, seed=7))


def test_private_samples_stay_and_the_host_reads_its_part_and_a_node_the_files_cut_for_it(job: Job) -> None:
    placed = place_plan(PLAN.ranks, PREPARED, job, FLEET)
    assert [shard.name for shard in placed] == [HOST_NAME, "csd0", "csd1"]
    assert [shard.num_private for shard in placed] == [0, 20, 0]
    assert [shard.num_samples for shard in placed] == [40, 40, 40]
    with pytest.raises(InputError, match="the plan needs csd1, not among the selected nodes"):
        place_plan(PLAN.ranks, PREPARED, job, replace(FLEET, nodes=FLEET.nodes[:1]))
    settings = {
        "threads": 8,
        "inter_threads": 2,
        "onednn": False,
        "max_batch_size": 16,
        "micro_batch_size": 4,
    }
    ranks = [replace(PLAN.ranks[0], **settings), *PLAN.ranks[1:]]
    host, csd0, csd1 = build_rank_specs(ranks, placed, PREPARED, {"csd1": (FILE, FILE)}, job)
    assert (host.runtime, host.max_batch_size, host.micro_batch_size) == (Runtime(8, 2, False), 16, 4)
    assert csd0.runtime == Runtime(4)
    assert host.public == DatasetSlice("data/public/images.npy", "data/public/labels.npy", 0, 40, 7, **HASHES)
    assert csd0.public is None
    assert csd0.private == DatasetSlice("data/private/images.npy", "data/private/labels.npy", **HASHES)
    assert csd1.public == DatasetSlice(
        FILE.path, FILE.path, images_sha256=FILE.sha256, labels_sha256=FILE.sha256
    )
    assert csd1.private is None


RACK = Fleet(
    (Node("a/csd0", "10.1.1.2"), Node("b", "10.0.0.2", server="b"), Node("b/csd0", "10.1.1.2", server="b"))
)


def test_rank_of_a_node_has_the_rank_of_its_server(job: Job) -> None:
    ranks = [RankPlan(node=name, batch_size=8, threads=1) for name in RACK.machines]
    specs = build_rank_specs(ranks, place_plan(ranks, PREPARED, job, RACK), PREPARED, {}, job)
    assert [rank.server for rank in with_servers(specs, RACK)] == [0, 0, 2, 2]
    with pytest.raises(InputError, match="the plan has no rank on b, through which its nodes are reached"):
        with_servers((specs[0], specs[3]), RACK)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_node_with_few_private_samples_repeats_them_if_the_job_says_so(
    job: Job, *, is_weighted: bool
) -> None:
    """And each counts once, however often it is read, if the job weighs by data sets."""
    few = replace(PREPARED, private={"csd0": PRIVATE, "csd1": replace(PRIVATE, num_samples=5)})
    private = PrivateData("/data/private", unequal="repeat")
    weights = "data-set" if is_weighted else "sample"
    job = replace(job, data=replace(job.data, private=private, weights=weights))
    placed = place_plan(PLAN.ranks, few, job, FLEET)
    _, csd0, csd1 = build_rank_specs(PLAN.ranks, placed, few, {}, job)
    assert (csd0.num_private, csd0.num_repeated, csd0.weight) == (20, 0, 1.0)
    assert (csd1.num_private, csd1.num_repeated) == (20, 15)
    assert csd1.weight == (1 - 15 / (20 + csd1.num_public) if is_weighted else 1.0)
