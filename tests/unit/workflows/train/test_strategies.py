"""Which strategy a run takes, and what its manifest says about it."""

import pytest

from csdctl.errors import InputError
from csdctl.tuning.plan import Plan, Predicted, RankPlan
from csdctl.workflows.train.spec import AUTO, TrainOptions, describe_strategy
from csdctl.workflows.train.train import choose_strategy

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
    ranks = [RankPlan(node="host", batch_size=8, threads=1)]
    return Plan.model_validate(
        {
            "job": "job",
            "job_fingerprint": "f",
            "method": "fit",
            "strategy": strategy,
            "cut": cut,
            "ranks": ranks,
        }
    ).model_copy(update={"predicted": PREDICTED})


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
