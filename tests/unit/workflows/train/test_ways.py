"""Which way a run takes, and what its manifest says about it."""

import pytest

from csdctl.errors import InputError
from csdctl.tuning.plan import Plan, Predicted, RankPlan
from csdctl.workflows.train.options import AUTO, TrainOptions, choose_planned_way
from csdctl.workflows.train.spec import describe_way

PREDICTED = Predicted(
    global_batch=8,
    step_s=0.1,
    samples_per_s=80.0,
    compute_share=1.0,
    imbalance_share=0.0,
    communication_share=0.0,
)


def plan_for(way: str, cut: str = "") -> Plan:
    ranks = [RankPlan(node="host", batch_size=8, threads=1)]
    return Plan.model_validate(
        {"job": "job", "job_fingerprint": "f", "method": "fit", "way": way, "cut": cut, "ranks": ranks}
    ).model_copy(update={"predicted": PREDICTED})


@pytest.mark.parametrize(
    ("way", "cut", "planned", "expected"),
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
def test_plan_names_the_way_unless_the_user_does(
    way: str, cut: str, planned: tuple[str, str], expected: tuple[str, str]
) -> None:
    assert choose_planned_way(way, cut, plan_for(*planned)) == expected


def test_prediction_of_a_plan_is_for_its_way_alone() -> None:
    split = plan_for("split", "block_4")
    assert describe_way(split, "split", "block_4")["predicted_samples_per_s"] == 80.0
    assert describe_way(split, "split", "block_2")["predicted_samples_per_s"] is None
    assert describe_way(split, "data-parallel", "")["predicted_samples_per_s"] is None
    features = plan_for("features")
    assert describe_way(features, "features", "")["predicted_samples_per_s"] is None
    assert describe_way(features, "data-parallel", "")["predicted_samples_per_s"] == 80.0


@pytest.mark.parametrize(("way", "cut"), [("sideways", ""), (AUTO, "block_4"), ("features", "block_4")])
def test_way_that_does_not_exist_and_cut_without_split_are_refused(way: str, cut: str) -> None:
    with pytest.raises(InputError):
        TrainOptions(way=way, cut=cut)
