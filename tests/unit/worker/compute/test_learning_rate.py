"""The learning rate of a step, against values computed manually."""

from dataclasses import replace
from typing import Any

import pytest

from csdctl.worker.compute.recipe import learning_rate
from csdctl.worker.protocol.recipe import Recipe

RECIPE = Recipe(epochs=10, learning_rate=0.1, reference_batch=256, warmup_epochs=2.0)


@pytest.mark.parametrize(
    ("changes", "global_batch", "expected"),
    [
        pytest.param({}, 1024, {0: 0.1, 0.5: 0.175, 1: 0.25, 1.5: 0.325, 2: 0.4, 3: 0.4}, id="warm-up"),
        pytest.param({}, 512, {1: 0.15, 2: 0.2}, id="a fleet that shrank"),
        pytest.param({}, 64, {0: 0.1, 1: 0.0625, 2: 0.025, 2.6: 0.025}, id="below the reference"),
        pytest.param({"warmup_epochs": 0}, 512, {0.01: 0.2}, id="no warm-up"),
        pytest.param({"epochs": 1, "warmup_epochs": 100}, 1024, {1: 0.103}, id="warm-up beyond the run"),
        pytest.param({"decay": "linear"}, 1024, {1: 0.25, 2: 0.4, 4: 0.3, 6: 0.2, 10: 0}, id="linear"),
        pytest.param({"decay": "cosine"}, 1024, {1: 0.25, 2: 0.4, 4: 0.341421, 6: 0.2, 10: 0}, id="cosine"),
        pytest.param({"decay": "cosine", "warmup_epochs": 10.0}, 1024, {10: 0.4}, id="no time to decay"),
        pytest.param({"max_learning_rate": 0.3}, 100_000, {2: 0.3}, id="capped"),
        pytest.param({"max_learning_rate": 0.3}, 512, {2: 0.2}, id="below the cap"),
    ],
)
def test_rate_by_epoch(changes: dict[str, Any], global_batch: int, expected: dict[float, float]) -> None:
    recipe = replace(RECIPE, **changes)
    found = {epoch: learning_rate(recipe, global_batch, epoch) for epoch in expected}
    assert found == pytest.approx(expected, abs=1e-6)
