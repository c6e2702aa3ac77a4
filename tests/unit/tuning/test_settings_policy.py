"""Which other runtime settings are probed, and when they are taken."""

from dataclasses import replace
from typing import Any

import pytest

from csdctl.perfmodel.prediction import StepTime
from csdctl.tuning.fleet_model import ClassModel, FleetModel
from csdctl.tuning.measurements import Point
from csdctl.tuning.plan_choice import next_settings, plan_settings_search
from csdctl.tuning.search import Limits
from csdctl.worker.protocol.run_spec import Runtime

LINE = StepTime(0.05, 0.02)
USUAL = Runtime(4)
LIMITS = Limits(global_batch=64)


@pytest.fixture
def model() -> FleetModel:
    """Two equal nodes, planned at 32 samples each, which were probed at 4, 8 and 16."""
    points = tuple(Point(size, LINE.at(size)) for size in (4, 8, 16))
    return FleetModel(("a", "b"), {"csd": ClassModel(("a", "b"), USUAL, points)})


def test_settings_are_compared_on_different_machines_at_the_smallest_comparable_size(
    model: FleetModel,
) -> None:
    first, left = next_settings(model, plan_settings_search(model, LIMITS))
    second, left = next_settings(model, left)
    assert first == {"a": (Runtime(4, onednn=False), 8), "b": (Runtime(2), 8)}
    assert second == {"a": (Runtime(4, inter_threads=2), 8), "b": (USUAL, 8)}
    assert next_settings(model, left) == ({}, {})


@pytest.mark.parametrize(
    ("known", "num_machines"),
    [
        ({"num_new_probes": 5}, 1),
        ({"num_new_probes": 6}, 0),
        ({"num_new_probes": 8}, 0),
        ({"trial_sizes": (32,)}, 0),  # a class with an earlier trial is not explored
    ],
)
def test_probes_are_left_for_the_new_settings(
    model: FleetModel, known: dict[str, Any], num_machines: int
) -> None:
    model = model.with_class("csd", replace(model.classes["csd"], **known))
    assert len(next_settings(model, plan_settings_search(model, LIMITS))[0]) == num_machines
