"""A layer that Keras does not know, for api_program.py."""

from typing import Any

import keras


class Scaled(keras.layers.Layer):
    """Multiplies by a constant."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x * self.factor

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}
