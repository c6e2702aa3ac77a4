"""Timing of a model's parts: of all cuts at which it can be divided."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csdctl.worker.compute.split import time_parts
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.probe import PartsSpec
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import Prefix, Runtime
from tests.unit.worker.compute.built_models import carry, keras

DATA = DatasetInfo("d", 100, (24, 24, 3), "uint8", (), 3, "f" * 32)


def build() -> Any:
    """Nearly all work is before the layer 'late', and nearly none before 'early'."""
    layers = keras().layers
    inputs = keras().Input((24, 24, 3))
    x = layers.Rescaling(1 / 255, name="early")(inputs)
    for width in (32, 48, 48):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
    x = layers.GlobalAveragePooling2D(name="late")(x)
    return keras().Model(inputs, layers.Dense(4, activation="softmax")(x))


def spec_for(directory: Path, recipe: Recipe, *cuts: str) -> PartsSpec:
    architecture, weights = carry(build(), directory, recipe)
    return PartsSpec(architecture, weights, recipe, Runtime(), DATA, 16, cuts, min_duration_s=0.05)


def test_parts_of_a_step_are_what_is_before_and_behind_the_cut(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, Recipe(learning_rate=0.01), "early", "late")
    spec = replace(spec, prefix=Prefix(spec.architecture, spec.weights, None))
    times = time_parts(spec)
    early, late = times.cuts
    assert (early.layer, late.layer, times.why_not) == ("early", "late", "")
    assert early.head_s > early.forward_s + early.backward_s
    assert late.forward_s + late.backward_s > late.head_s
    assert min(times.step_s, times.evaluation_s, times.features_s) > 0


@pytest.mark.parametrize(
    ("arguments", "cut", "why_not"),
    [
        ({"global_clipnorm": 1.0}, "late", "clips by the norm of the whole gradient"),
        ({}, "nowhere", "cannot be cut after 'nowhere'"),
    ],
)
def test_model_that_cannot_be_divided_is_timed_as_a_whole(
    tmp_path: Path, arguments: dict[str, Any], cut: str, why_not: str
) -> None:
    times = time_parts(spec_for(tmp_path, Recipe(learning_rate=0.01, optimizer_args=arguments), cut))
    assert times.step_s > 0
    assert times.cuts == ()
    assert why_not in times.why_not
