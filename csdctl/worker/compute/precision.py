"""The types that the layers of a model compute in."""

from typing import Any

from csdctl.worker.compute.backend import keras
from csdctl.worker.compute.keras_internals import flatten_layers
from csdctl.worker.engine.step import ROUNDOFFS


def compute_type(model: Any) -> str:
    """Return the coarsest type that a layer with weights computes in."""
    types = {layer.compute_dtype for layer in flatten_layers(model) if layer.weights} & set(ROUNDOFFS)
    coarsest: str = max(types or {model.compute_dtype}, key=ROUNDOFFS.__getitem__)
    return coarsest


def widen(model: Any) -> None:
    """Let layers that compute in 16 bits compute in float32 from now on. The weights keep their type.

    In 16 bits, kernels differ by as much as a sample: some add in 16 bits, others in 32.
    """
    for layer in (model, *flatten_layers(model)):
        if layer.compute_dtype in ("float16", "bfloat16"):
            layer.dtype_policy = _make_policy("float32", layer.dtype_policy.variable_dtype)


def _make_policy(dtype: str, variable_dtype: str) -> Any:
    """Return the policy of a layer that computes in `dtype` with weights of another type."""

    class Policy(keras.DTypePolicy):  # type: ignore[misc]
        @property
        def variable_dtype(self) -> str:
            return variable_dtype

    return Policy(dtype)
