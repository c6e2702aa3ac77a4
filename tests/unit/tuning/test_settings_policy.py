"""Which other runtime settings are probed, and when they are taken."""

from dataclasses import replace

import pytest

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.fits import Point
from csdctl.tuning.fleet_model import MAX_PROBES, ClassModel, FleetModel
from csdctl.tuning.probe_policy import (
    PROBES_PER_VARIANT,
    learn_settings,
    next_settings,
    plan_settings_search,
)
from csdctl.tuning.search import Limits
from csdctl.worker.protocol.run_spec import Runtime

LINE = StepTime(0.05, 0.02)
FOUR = Runtime(4)
LIMITS = Limits(global_batch=64)


@pytest.fixture
def model() -> FleetModel:
    """Two equal nodes, planned at 32 samples each, which were probed at 4, 8 and 16."""
    points = tuple(Point(size, LINE.at(size)) for size in (4, 8, 16))
    return FleetModel(("a", "b"), {"csd": ClassModel(("a", "b"), FOUR, points, num_new_probes=3)})


def test_variants_are_compared_at_the_smallest_comparable_size(model: FleetModel) -> None:
    search = plan_settings_search(model, LIMITS)
    assert search.sizes == {"csd": 8}
    assert search.variants["csd"] == (
        Runtime(4, onednn=False),
        Runtime(2),
        Runtime(4, inter_threads=2),
    )


def test_rounds_take_turns_over_the_machines(model: FleetModel) -> None:
    search = plan_settings_search(model, LIMITS)
    rounds = [next_settings(model, search, number) for number in range(4)]
    assert [[probe.machine for probe in probes] for probes in rounds] == [["a"], ["b"], ["a"], []]


def test_class_without_probes_left_is_not_explored_further(model: FleetModel) -> None:
    search = plan_settings_search(model, LIMITS)
    used = replace(model.classes["csd"], num_new_probes=MAX_PROBES - PROBES_PER_VARIANT + 1)
    assert next_settings(model.with_class("csd", used), search, 0) == []


def test_class_with_an_earlier_trial_is_not_explored(model: FleetModel) -> None:
    known = model.with_class("csd", replace(model.classes["csd"], has_earlier_trial=True))
    assert plan_settings_search(known, LIMITS).sizes == {}


@pytest.mark.parametrize(("ratio", "is_taken"), [(0.8, True), (0.9, False), (1.4, False)])
def test_settings_are_taken_when_they_are_clearly_faster(
    model: FleetModel, ratio: float, is_taken: bool
) -> None:
    [probe] = next_settings(model, plan_settings_search(model, LIMITS), 0)
    learned = learn_settings(model, probe, 2, LINE.at(8) * ratio).classes["csd"]
    assert (learned.settings == probe.settings) == is_taken
    assert learned.step_time().at(20) == pytest.approx(LINE.at(20) * (ratio if is_taken else 1.0))
    assert learned.num_new_probes == 5


def test_settings_without_a_second_probe_only_count(model: FleetModel) -> None:
    [probe] = next_settings(model, plan_settings_search(model, LIMITS), 0)
    assert not probe.is_promising(LINE.at(8) * 1.6)
    learned = learn_settings(model, probe, 1, None)
    assert learned.classes["csd"] == replace(model.classes["csd"], num_new_probes=4)
