"""Early stopping and reduce on plateau over made-up results."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.recipe import EarlyStopping, Recipe, ReduceOnPlateau
from csdctl.worker.tasks.callbacks import after_epoch, check_monitors, is_higher_better
from csdctl.worker.tasks.progress import CallbackState
from tests.unit.worker.compute.built_models import keras


def run(
    recipe: Recipe, losses: list[float], name: str = "validation_loss"
) -> list[tuple[CallbackState, bool]]:
    states, progressed = [], CallbackState()
    for epoch, loss in enumerate(losses, start=1):
        progressed, is_best = after_epoch(recipe, progressed, epoch, {name: loss})
        states.append((progressed, is_best))
    return states


@pytest.mark.parametrize("name", ["validation_loss", "loss"])
def test_best_epoch_has_the_smallest_loss_which_is_that_of_training_without_validation_data(
    name: str,
) -> None:
    states = run(Recipe(), [float("nan"), 3.0, 2.0, 2.5, float("nan"), 1.9, 2.2], name)
    assert [is_best for _, is_best in states] == [False, True, True, False, False, True, False]
    assert states[-1][0].best_epoch == 6


def test_result_of_an_epoch_can_be_monitored_and_no_other() -> None:
    for name in ("loss", "validation_loss", "accuracy", "validation_accuracy"):
        check_monitors(Recipe(early_stopping=EarlyStopping(name)), ["accuracy"])
    for recipe in (
        Recipe(early_stopping=EarlyStopping("accurancy")),
        Recipe(reduce_on_plateau=ReduceOnPlateau("accurancy")),
    ):
        with pytest.raises(
            WorkerError, match="monitors 'accurancy', which is not among the results"
        ) as caught:
            check_monitors(recipe, ["auc"])
        assert caught.value.remedy == "one of loss, auc, validation_loss, validation_auc"
        assert caught.value.exit_code == 2


def watch(callback: Any) -> Any:
    """Return what a callback of Keras watches: a model that has not trained yet."""
    rate = SimpleNamespace(learning_rate=1.0)
    played = SimpleNamespace(stop_training=False, metrics=(), optimizer=rate, get_weights=list)
    callback.set_model(played)
    callback.on_train_begin()
    return played


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"patience": 0},
        {"mode": "max"},
        {"baseline": 0.6},
        {"start_from_epoch": 3},
        {"start_from_epoch": 2, "baseline": 0.5, "min_delta": 0.05},
    ],
    ids=str,
)
def test_early_stopping_ends_where_that_of_keras_does(options: dict[str, Any], seed: int) -> None:
    losses = np.random.default_rng(seed).random(40) * np.linspace(1, 0.3, 40)
    keras_options = {"patience": 3, "mode": "min"} | options
    callback = keras().callbacks.EarlyStopping("val_loss", **keras_options)
    played = watch(callback)
    for epoch, loss in enumerate(losses):
        callback.on_epoch_end(epoch, {"val_loss": loss})
        if played.stop_training:
            break
    states = run(Recipe(early_stopping=EarlyStopping(**{"patience": 3} | options)), list(losses))
    ended = [number for number, (state, _) in enumerate(states) if state.is_stopping]
    assert (ended or [len(losses) - 1])[0] == epoch
    if played.stop_training:
        assert states[epoch][0].best_epoch == callback.best_epoch + 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cooldown", [0, 1, 3])
def test_plateau_lowers_the_rate_where_keras_does_down_to_its_minimum(cooldown: int, seed: int) -> None:
    losses = list(np.random.default_rng(seed).random(40))
    options = {"factor": 0.5, "patience": 2, "cooldown": cooldown}
    callback = keras().callbacks.ReduceLROnPlateau("val_loss", min_lr=0.1, **options)
    played = watch(callback)
    rates = []
    for epoch, loss in enumerate(losses):
        callback.on_epoch_end(epoch, {"val_loss": loss})
        rates.append(played.optimizer.learning_rate)
    rule = ReduceOnPlateau(**options, min_factor=0.1)
    assert [state.rate_factor for state, _ in run(Recipe(reduce_on_plateau=rule), losses)] == rates
    assert rates[-1] == 0.1


def test_metrics_of_which_more_is_better() -> None:
    higher = ("acc", "validation_acc", "f1_score", "val_top_k_categorical_accuracy")
    assert all(map(is_higher_better, higher))
    assert not any(is_higher_better(name, "min") for name in higher)
    assert is_higher_better("my_score", "max")
    assert not any(map(is_higher_better, ("my_score", "mean_absolute_error")))
