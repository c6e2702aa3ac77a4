"""The types that a model's layers compute in: how they round, and computing in a finer one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from csdctl.worker.compute.keras_internals import flatten_layers
from csdctl.worker.compute.step import Step

ROUNDOFFS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a type; the finest type first."""
_TYPES = tuple(ROUNDOFFS)


def coarsest(*types: str) -> str:
    """Return the one of `types` that rounds most."""
    return max(types, key=_TYPES.index)


def weights_by_type(model: Any) -> list[tuple[Any, str]]:
    """Return the weights that are floats, each with the type that its layer computes in."""
    found = {id(weight): (weight, model.compute_dtype) for weight in model.weights}
    for layer in flatten_layers(model):  # a layer comes before those that it contains
        found |= {id(weight): (weight, layer.compute_dtype) for weight in layer.weights}
    return [
        (weight, dtype)
        for weight, dtype in found.values()
        if str(weight.dtype) in ROUNDOFFS and dtype in ROUNDOFFS
    ]


def compute_type(model: Any) -> str:
    """Return the coarsest type that a layer with weights computes in."""
    return coarsest(*(dtype for _, dtype in weights_by_type(model)))


def types_to_compare_in(dtype: str) -> tuple[str, ...]:
    """Return the types in which the gradient of a model that computes in `dtype` may be compared, in order.

    In 16 bits, kernels differ by as much as a sample: some add in 16 bits, others in 32.
    """
    return ("float64",) if dtype == "float64" else ("float32", "float64")


@contextmanager
def computing_in(step: Step, dtype: str) -> Iterator[None]:
    """Let layers that compute in a coarser type compute in `dtype`; the weights keep their type."""
    model = step.model
    coarser = [
        (layer, layer.dtype_policy)
        for layer in (model, *flatten_layers(model))
        if layer.compute_dtype in ROUNDOFFS and coarsest(layer.compute_dtype, dtype) != dtype
    ]
    if not coarser:
        yield
        return
    for layer, policy in coarser:
        layer.dtype_policy = _make_policy(dtype, policy.variable_dtype)
    step.retrace()
    try:
        yield
    finally:
        for layer, policy in coarser:
            layer.dtype_policy = policy
        step.retrace()


def _make_policy(dtype: str, variable_dtype: str) -> Any:
    """Return the policy of a layer that computes in `dtype` with weights of another type."""
    from keras import DTypePolicy

    class Policy(DTypePolicy):  # type: ignore[misc]
        @property
        def variable_dtype(self) -> str:
            return variable_dtype

    return Policy(dtype)
