"""Inputs, outputs and weights by name or in order: the loss of a step is that of Keras' evaluate."""

from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.protocol.recipe import Recipe
from tests.unit.worker.compute.built_models import Step, as_records

tf, keras = load_backend()

COUNT = 12
GENERATOR = np.random.default_rng(3)
INPUTS = {"b": GENERATOR.random((COUNT, 1)), "a": GENERATOR.random((COUNT, 3))}
LABELS = {"kind": np.arange(COUNT) % 2, "age": GENERATOR.random(COUNT)}
WEIGHTS = np.linspace(0, 2, COUNT)
LOSSES = {"kind": "sparse_categorical_crossentropy", "age": "mse"}


def build(*, named: bool, normalized: bool = False, features: bool = False) -> Any:
    """Return a model of two inputs and two outputs, as dicts or as lists; `features`: with a third one."""
    first, second = keras.Input((3,), name="a"), keras.Input((1,), name="b")
    scaled = keras.layers.Rescaling(0.5)(first)
    joined = keras.layers.Concatenate()([scaled, second])
    outputs = {
        "kind": keras.layers.Dense(2, activation="softmax", name="kind")(joined),
        "age": keras.layers.Dense(1, name="age")(joined),
    }
    if features:
        outputs = {"features": keras.layers.Dense(4, name="features")(joined), **outputs}
    # A dict of tensors that are no inputs: Keras clones them under other names.
    inputs = {"a": scaled if normalized else first, "b": second}
    model = keras.Model(
        inputs if named else list(inputs.values()), outputs if named else list(outputs.values())
    )
    losses = LOSSES if named or not features else {**LOSSES, "features": None}
    model.compile("sgd", loss=losses)
    return model


def loss_of(model: Any, samples: np.ndarray, labels: np.ndarray) -> float:
    step = Step(model, Recipe(input_range=None), (samples[:0], labels[:0]))
    return step.evaluate(samples, labels).mean_loss


def loss_of_keras(model: Any, inputs: Any, labels: Any) -> float:
    return float(model.evaluate(inputs, labels, sample_weight=WEIGHTS, verbose=0, return_dict=True)["loss"])


@pytest.mark.parametrize("normalized", [False, True])
def test_dicts_are_taken_by_name_in_any_order(normalized: bool) -> None:
    model = build(named=True, normalized=normalized)
    expected = loss_of_keras(model, INPUTS, LABELS)
    for order in (list, lambda names: list(reversed(list(names)))):
        samples = as_records({name: INPUTS[name] for name in order(INPUTS)})
        labels = as_records({name: LABELS[name] for name in order(LABELS)}, WEIGHTS)
        assert loss_of(model, samples, labels) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("features", [False, True])
def test_tuples_are_taken_in_order_and_an_output_without_a_loss_needs_no_labels(
    named: bool, features: bool
) -> None:
    model = build(named=named, features=features)
    inputs, labels = (INPUTS["a"], INPUTS["b"]), tuple(LABELS.values())
    samples = as_records({f"input_{number}": values for number, values in enumerate(inputs)})
    records = as_records({f"output_{number}": values for number, values in enumerate(labels)}, WEIGHTS)
    if features:
        samples, records = as_records(INPUTS), as_records(LABELS, WEIGHTS)
    unused = [np.zeros((COUNT, 4))] * features
    expected = loss_of_keras(model, *((INPUTS, LABELS) if named else ([*inputs], [*unused, *labels])))
    assert loss_of(model, samples, records) == pytest.approx(expected, rel=1e-6)
