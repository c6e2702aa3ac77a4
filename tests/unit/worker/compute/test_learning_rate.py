"""The learning rate of a step, against values computed manually."""

from dataclasses import replace

import pytest

from csdctl.worker.compute.recipe import learning_rate
from csdctl.worker.protocol.recipe import Recipe

RECIPE = Recipe(epochs=10, learning_rate=0.1, reference_batch=256, warmup_epochs=2.0)


def test_rate_is_proportional_to_the_global_batch() -> None:
    assert learning_rate(RECIPE, 1024, 2.0) == pytest.approx(0.4)
    assert learning_rate(RECIPE, 64, 2.5) == pytest.approx(0.025)
    assert learning_rate(RECIPE, 256, 9.0) == pytest.approx(0.1)


def test_warm_up_is_linear_from_the_rate_of_the_reference_batch() -> None:
    found = [learning_rate(RECIPE, 1024, epochs_done) for epochs_done in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)]
    assert found == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4])


def test_warm_up_goes_down_when_the_global_batch_is_below_the_reference() -> None:
    found = [learning_rate(RECIPE, 64, epochs_done) for epochs_done in (0.2, 0.8, 1.4, 2.0, 2.6)]
    assert found == sorted(found, reverse=True)
    assert found[-2:] == pytest.approx([0.025, 0.025])


def test_rate_without_warm_up_starts_at_its_target() -> None:
    assert learning_rate(Recipe(learning_rate=0.1, warmup_epochs=0), 512, 0.01) == pytest.approx(0.2)


def test_warm_up_longer_than_the_run_never_reaches_the_target() -> None:
    recipe = Recipe(epochs=1, learning_rate=0.1, warmup_epochs=100)
    assert learning_rate(recipe, 1024, 1.0) < 0.11


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("none", [0.4] * 4), ("linear", [0.4, 0.3, 0.2, 0]), ("cosine", [0.4, 0.341421, 0.2, 0])],
)
def test_rate_decays_from_the_end_of_the_warm_up_to_the_end_of_the_run(
    decay: str, expected: list[float]
) -> None:
    recipe = replace(RECIPE, decay=decay)
    assert learning_rate(recipe, 1024, 1.0) == learning_rate(RECIPE, 1024, 1.0)
    found = [learning_rate(recipe, 1024, epochs_done) for epochs_done in (2.0, 4.0, 6.0, 10.0)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_warm_up_as_long_as_the_run_leaves_no_decay() -> None:
    assert learning_rate(replace(RECIPE, warmup_epochs=10.0, decay="cosine"), 1024, 10.0) == pytest.approx(
        0.4
    )


def test_rate_is_capped_at_any_batch_size() -> None:
    recipe = Recipe(learning_rate=0.1, reference_batch=256, max_learning_rate=0.3)
    assert learning_rate(recipe, 100_000, 1.0) == pytest.approx(0.3)
    assert learning_rate(recipe, 512, 1.0) == pytest.approx(0.2)


def test_rate_follows_a_fleet_that_shrinks_during_the_warm_up() -> None:
    assert learning_rate(RECIPE, 512, 1.0) == pytest.approx(0.15)
    assert learning_rate(RECIPE, 1024, 1.0) == pytest.approx(0.25)
