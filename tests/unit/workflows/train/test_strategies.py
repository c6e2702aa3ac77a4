"""Which strategy a run takes, what its manifest says about it, and what a job must allow before a split."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.job.model import Job, load_job
from csdctl.tuning.plan import Plan, Predicted, RankPlan
from csdctl.workflows.train.request import AUTO, TrainOptions
from csdctl.workflows.train.run import describe_strategy
from csdctl.workflows.train.strategies import check_job, choose_strategy

JOB = """\
model: model.py:build
data: {public: {path: public}, private: {path: private%s}}
recipe: {epochs: 1, learning_rate: 0.1}
"""

PREDICTED = Predicted(
    global_batch=8,
    batch_sizes=[8],
    step_s=0.1,
    samples_per_s=80.0,
    compute_share=1.0,
    imbalance_share=0.0,
    communication_share=0.0,
)


def plan_for(strategy: str, cut: str = "") -> Plan:
    planned = {"strategy": strategy, "cut": cut, "predicted": PREDICTED}
    ranks = [RankPlan(node="host", batch_size=8, threads=1)]
    return Plan(job="job", job_fingerprint="f", method="fit", ranks=ranks, **planned)


@pytest.mark.parametrize(
    ("strategy", "cut", "planned", "expected"),
    [
        (AUTO, "", ("data-parallel", ""), ("data-parallel", "")),
        (AUTO, "", ("features", ""), ("features", "")),
        (AUTO, "", ("split", "block_4"), ("split", "block_4")),
        ("split", "", ("split", "block_4"), ("split", "block_4")),
        ("split", "block_2", ("split", "block_4"), ("split", "block_2")),
        ("split", "", ("data-parallel", ""), ("split", "")),
        ("data-parallel", "", ("split", "block_4"), ("data-parallel", "")),
    ],
)
def test_plan_names_the_strategy_unless_the_user_does(
    strategy: str, cut: str, planned: tuple[str, str], expected: tuple[str, str]
) -> None:
    chosen = choose_strategy(TrainOptions(strategy=strategy, cut=cut), plan_for(*planned))
    assert (chosen.name, chosen.cut) == expected


def test_prediction_of_a_plan_is_for_its_strategy_alone() -> None:
    split = plan_for("split", "block_4")
    assert describe_strategy(split, "split", "block_4")["predicted_samples_per_s"] == 80.0
    assert describe_strategy(split, "split", "block_2")["predicted_samples_per_s"] is None
    assert describe_strategy(split, "data-parallel", "")["predicted_samples_per_s"] is None
    features = plan_for("features")
    assert describe_strategy(features, "features", "")["predicted_samples_per_s"] is None
    assert describe_strategy(features, "data-parallel", "")["predicted_samples_per_s"] == 80.0


@pytest.mark.parametrize(("strategy", "cut"), [("sideways", ""), (AUTO, "block_4"), ("features", "block_4")])
def test_strategy_that_does_not_exist_and_cut_without_split_are_refused(strategy: str, cut: str) -> None:
    with pytest.raises(InputError):
        TrainOptions(strategy=strategy, cut=cut)
    # Options of a strategy that the plan may choose are accepted.
    TrainOptions(num_micro_batches=2, feature_precision="float16")


def load(directory: Path, more: str) -> Job:
    (directory / "job.yaml").write_text(JOB % more)
    (directory / "model.py").write_text("def build(): ...\n")
    return load_job(directory / "job.yaml")


def test_activations_of_private_samples_leave_if_the_job_says_so_and_has_no_noise(tmp_path: Path) -> None:
    check_job(load(tmp_path, ", activations: may-leave"))
    with pytest.raises(InputError, match="which the job does not allow"):
        check_job(load(tmp_path, ""))
    more = ", activations: may-leave, noise: {noise_multiplier: 1.0, l2_norm_clip: 1.0, delta: 1e-5}"
    with pytest.raises(InputError, match="noise hides each sample in a sum"):
        check_job(load(tmp_path, more))
