"""Part of a model run by LiteRT: the same numbers but for rounding, without TensorFlow.

LiteRT starts in a quarter of a second and takes 70 MB. The host converts the part, where TensorFlow is; the
machine that runs it needs the package ai-edge-litert alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.forward import BatchedPass
from csdctl.worker.compute.model import load
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.run_spec import Prefix

PACKAGE = "ai-edge-litert"
LITE_BATCH_SIZE = 8
"""Samples that LiteRT computes at a time: as fast as 32 for EfficientNet-Lite0 at 96×96, in 30 MB less."""


class LitePass(BatchedPass):
    """Runs the LiteRT model of `part` over samples."""

    def __init__(self, part: Prefix, convert: Callable[[list[Array]], Array], threads: int) -> None:
        """Raise WorkerError if LiteRT is missing here, or cannot run the model."""
        super().__init__(convert)
        check_stored(part.lite)
        try:
            from ai_edge_litert.interpreter import Interpreter
        except ImportError as error:
            raise WorkerError(
                f"has no LiteRT: {describe(error)}",
                remedy=f"install the package {PACKAGE} there, or use --feature-engine keras",
                exit_code=2,
            ) from None
        try:
            self._interpreter = Interpreter(model_path=part.lite, num_threads=threads)
            (self._input,) = self._interpreter.get_input_details()
            shape = [LITE_BATCH_SIZE, *self._input["shape"][1:].tolist()]
            self._interpreter.resize_tensor_input(self._input["index"], shape, strict=True)
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise WorkerError(
                f"LiteRT cannot run the model: {describe(error)}",
                remedy="use --feature-engine keras",
                exit_code=2,
            ) from None
        self._outputs = self._interpreter.get_output_details()
        self._range = part.input_range

    def compute(self, samples: Array) -> list[Array]:
        """Return the outputs of one batch, each of shape (BATCH_SIZE, …)."""
        parts = [
            self._invoke(samples[start : start + LITE_BATCH_SIZE])
            for start in range(0, len(samples), LITE_BATCH_SIZE)
        ]
        return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]

    def _invoke(self, samples: Array) -> list[Array]:
        scaled = scale(samples, self._range, self._input["dtype"])
        self._interpreter.set_tensor(self._input["index"], scaled)
        self._interpreter.invoke()
        return [self._interpreter.get_tensor(output["index"]) for output in self._outputs]


def scale(values: Array, input_range: tuple[float, float] | None, dtype: Any) -> Array:
    """Return values as the model's input, as objective.py's `scale` does with tensors."""
    if values.dtype == np.uint8 and input_range is not None:
        low, high = input_range
        return values.astype(np.float32) * np.float32((high - low) / 255.0) + np.float32(low)
    return values.astype(dtype)


def convert(part: Prefix, output: Path, tf: Any, keras: Any) -> int:
    """Write `part` as a LiteRT model in float32; returns the number of bytes.

    Raises WorkerError, exit code 2, for a model that has operations which LiteRT does not have.
    """
    model = load(Path(part.architecture), Path(part.weights), keras, part.code)
    try:
        content = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    except Exception as error:  # of any of its passes
        raise WorkerError(
            f"the model's frozen part cannot be converted for LiteRT: {describe(error)}",
            remedy="use --feature-engine keras",
            exit_code=2,
        ) from None
    output.write_bytes(content)
    return len(content)
