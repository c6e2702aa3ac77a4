import pytest

from csdctl.worker.contract import Recipe
from csdctl.worker.train_rank import learning_rate

RECIPE = Recipe(epochs=10, learning_rate=0.1, reference_batch=256, warmup_epochs=2.0)
STEPS = 5


def rates(recipe: Recipe, global_batch: int, num_steps: int) -> list[float]:
    return [learning_rate(recipe, global_batch, step, STEPS) for step in range(num_steps)]


def test_rate_grows_with_the_global_batch() -> None:
    assert learning_rate(RECIPE, 1024, 10, STEPS) == pytest.approx(0.4)
    assert learning_rate(RECIPE, 64, 10, STEPS) == pytest.approx(0.025)
    assert learning_rate(RECIPE, 256, 10, STEPS) == pytest.approx(0.1)


def test_warm_up_is_a_straight_line_from_the_rate_of_one_batch() -> None:
    found = rates(RECIPE, 1024, 12)
    assert found == pytest.approx([0.1 + 0.3 * (step + 1) / 10 for step in range(10)] + [0.4, 0.4])


def test_warm_up_goes_down_when_the_global_batch_is_below_the_reference() -> None:
    found = rates(RECIPE, 64, 12)
    assert found[:10] == sorted(found[:10], reverse=True)
    assert found[9:] == pytest.approx([0.025] * 3)


def test_no_warm_up_starts_at_the_full_rate() -> None:
    assert learning_rate(Recipe(learning_rate=0.1, warmup_epochs=0), 512, 0, STEPS) == pytest.approx(0.2)


def test_part_of_an_epoch_warms_up_for_whole_steps() -> None:
    recipe = Recipe(learning_rate=0.1, reference_batch=256, warmup_epochs=0.5)  # 2.5 steps of 5
    assert rates(recipe, 512, 4) == pytest.approx([0.1 + 0.1 / 3, 0.1 + 0.2 / 3, 0.2, 0.2])


def test_warm_up_longer_than_the_run_never_reaches_the_full_rate() -> None:
    recipe = Recipe(epochs=1, learning_rate=0.1, warmup_epochs=100)
    assert rates(recipe, 1024, STEPS)[-1] < 0.11
