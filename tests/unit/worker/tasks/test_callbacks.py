"""Early stopping and reduce on plateau over made-up results."""

import pytest

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.recipe import EarlyStopping, Recipe, ReduceOnPlateau
from csdctl.worker.tasks.callbacks import after_epoch, is_higher_better
from csdctl.worker.tasks.position import CallbackState


def run(
    recipe: Recipe, losses: list[float], name: str = "validation_loss"
) -> list[tuple[CallbackState, bool]]:
    found, progressed = [], CallbackState()
    for epoch, loss in enumerate(losses, start=1):
        progressed, is_best = after_epoch(recipe, progressed, epoch, {name: loss})
        found.append((progressed, is_best))
    return found


def test_best_epoch_has_the_smallest_loss() -> None:
    found = run(Recipe(), [3.0, 2.0, 2.5, 1.9, 2.2])
    assert [is_best for _, is_best in found] == [True, True, False, True, False]
    assert found[-1][0].best_epoch == 4


def test_training_loss_is_monitored_without_validation_data() -> None:
    assert [is_best for _, is_best in run(Recipe(), [3.0, 2.0, 2.5], "loss")] == [True, True, False]


def test_larger_accuracy_is_better() -> None:
    recipe = Recipe(early_stopping=EarlyStopping("validation_accuracy", patience=2))
    found = run(recipe, [0.5, 0.7, 0.6, 0.69], "validation_accuracy")
    assert [one.is_stopping for one, _ in found] == [False, False, False, True]
    assert is_higher_better("val_top_k_categorical_accuracy")
    assert not is_higher_better("mean_absolute_error")


def test_early_stopping_respects_patience_and_min_delta() -> None:
    recipe = Recipe(early_stopping=EarlyStopping(patience=2, min_delta=0.1))
    found = run(recipe, [3.0, 2.95, 2.92])
    assert [one.is_stopping for one, _ in found] == [False, False, True]


def test_plateau_lowers_the_learning_rate_down_to_its_minimum() -> None:
    recipe = Recipe(reduce_on_plateau=ReduceOnPlateau(patience=2, factor=0.1, min_factor=0.05))
    found = run(recipe, [1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
    assert [one.rate_factor for one, _ in found] == [1.0, 1.0, 0.1, 0.1, 0.05, 0.05]


def test_nan_loss_is_not_an_improvement() -> None:
    assert [is_best for _, is_best in run(Recipe(), [float("nan"), 2.0, float("nan")])] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(early_stopping=EarlyStopping("accurancy")),
        Recipe(reduce_on_plateau=ReduceOnPlateau("accurancy")),
    ],
    ids=["early_stopping", "reduce_on_plateau"],
)
def test_unknown_metric_is_refused(recipe: Recipe) -> None:
    with pytest.raises(WorkerError, match="monitors 'accurancy', which is not among the results") as caught:
        after_epoch(recipe, CallbackState(), 1, {"loss": 1.0, "validation_loss": None})
    assert caught.value.remedy == "one of loss, validation_loss"
