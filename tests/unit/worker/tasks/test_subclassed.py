"""A model whose class has no get_config, and no outputs before it is called."""

from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.tasks.checkpointer import save_model
from csdctl.worker.tasks.verify import draw_samples
from tests.unit.worker.compute.built_models import keras


def build(width: int) -> Any:
    class Pair(keras().Model):  # type: ignore[misc]
        def __init__(self, first: Any) -> None:
            super().__init__()
            self.first, self.second = first, keras().layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.second(self.first(inputs))

    model = Pair(keras().layers.Dense(width))
    model(np.zeros((1, 4), np.float32))
    return model


def test_samples_are_drawn_for_it() -> None:
    example = np.zeros((0, 4), np.float32), np.zeros((0, 5), np.int32)
    samples, labels = draw_samples(1, 0, 20, example, build(2))
    assert samples.shape == (20, 4)
    assert labels.max() == 1


def test_its_weights_are_saved_where_keras_cannot_save_the_model(tmp_path: Path) -> None:
    model, again = build(2), build(2)
    path = save_model(model, tmp_path / "model.keras")
    assert [path] == list(tmp_path.iterdir())
    assert path.name == "model.weights.h5"
    again.load_weights(path)
    values = np.ones((2, 4), np.float32)
    assert np.array_equal(model(values), again(values))
