from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, Node
from csdctl.job.model import Job, load_job
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.workflows.train import check_plan

FLEET = Fleet((Node("csd0", "10.77.0.10"), Node("csd1", "10.77.0.11")))
JOB = """\
model: keras.applications:MobileNetV2
data: {public: {path: public}}
recipe: {epochs: 1, learning_rate: 0.01, reference_batch: 16}
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return load_job(path)


def make_plan(job: Job, left_out: list[str]) -> Plan:
    ranks = [RankPlan(node=name, batch_size=8, threads=1) for name in ("host", "csd0")]
    return Plan(job=job.name, job_fingerprint=job.fingerprint(), method="fit", left_out=left_out, ranks=ranks)


def test_node_that_tuning_left_out_stays_out_without_a_word(job: Job) -> None:
    check_plan(make_plan(job, ["csd1"]), job, FLEET)


def test_node_that_the_plan_does_not_know_is_named(job: Job) -> None:
    with pytest.raises(InputError, match="the plan has nothing for csd1"):
        check_plan(make_plan(job, []), job, FLEET)
