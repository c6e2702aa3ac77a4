"""Which sizes and settings are probed, of machines that are functions: exact, or short of memory."""

from collections.abc import Mapping

import pytest

from csdctl.perfmodel.prediction import CollectiveCost, RankModel, StepTime, predict
from csdctl.tuning.fleet_model import ClassModel, FleetModel, learn_probes
from csdctl.tuning.measurements import Point, ProbeOutcome
from csdctl.tuning.plan_choice import COMPARED_SIZE, MAX_PROBES, choose_plan, next_probes
from csdctl.tuning.search import BestPlan, Limits, find_best
from csdctl.tuning.stannis import Measure, TuningError

LIMITS = Limits(max_global_batch=1024)
EQUAL_NODES = {"host": (StepTime(0.01, 0.003), 1), "a": (StepTime(0.03, 0.02), 4)}
FOUR_CLASSES = {**EQUAL_NODES, "b": (StepTime(0.02, 0.012), 3), "c": (StepTime(0.05, 0.05), 2)}


class Machines:
    """A fleet of functions: `measure` is Algorithm 1's, with noise, and counts."""

    def __init__(
        self, classes: Mapping[str, tuple[StepTime, int]], memory: Mapping[str, int] | None = None
    ) -> None:
        self.classes = classes
        self.class_of = {f"{key}{n}": key for key, (_, count) in classes.items() for n in range(count)}
        self._memory = memory or {}
        self.probed: list[tuple[str, int]] = []

    def measure(self, sizes: Mapping[str, int]) -> dict[str, float | None]:
        self.probed += sizes.items()
        return {
            machine: self.classes[key][0].at(size) if size <= self._memory.get(key, size) else None
            for machine, size in sizes.items()
            for key in (self.class_of[machine],)
        }

    def model(self) -> FleetModel:
        """Nothing is known yet."""
        classes = {
            key: ClassModel(tuple(name for name, its in self.class_of.items() if its == key))
            for key in self.classes
        }
        return FleetModel(tuple(self.class_of), classes, collective_cost=CollectiveCost(per_rank_s=0.01))

    def best(self, step_times: Mapping[str, StepTime]) -> BestPlan:
        candidates = [
            RankModel(name, step_times[key], is_required=key == "host") for name, key in self.class_of.items()
        ]
        return find_best(candidates, LIMITS, lambda ranks: 0.01 * ranks)

    def loss(self, chosen: BestPlan) -> float:
        """By how much the true machines are slower with `chosen` than with the true best plan."""
        true = {key: step_time for key, (step_time, _) in self.classes.items()}
        models = [RankModel(name, true[self.class_of[name]]) for name in chosen.batch_sizes]
        reached = predict(models, list(chosen.batch_sizes.values()), 0.01 * len(models))
        return 1 - reached.samples_per_s / self.best(true).prediction.samples_per_s

    def num_probes(self, key: str) -> int:
        return len({size for machine, size in self.probed if self.class_of[machine] == key})


def probed(model: FleetModel, measure: Measure, limits: Limits) -> FleetModel:
    """The model after as many rounds as the policy wants."""
    while sizes := next_probes(model, limits):
        times = measure(sizes)
        model = learn_probes(model, {name: ProbeOutcome(size, times[name]) for name, size in sizes.items()})
    return model


def probed_class(members: ClassModel, measure: Measure, planned: int) -> ClassModel:
    """A class of machine 'a' after as many rounds as the policy wants for the planned size."""
    return probed(FleetModel(("a",), {"a": members}), measure, Limits(global_batch=planned)).classes["a"]


@pytest.mark.parametrize("classes", [EQUAL_NODES, FOUR_CLASSES])
def test_few_probes_find_the_best_plan_of_exact_machines(classes: dict[str, tuple[StepTime, int]]) -> None:
    machines = Machines(classes)
    model = probed(machines.model(), machines.measure, LIMITS)
    assert (
        machines.loss(machines.best({key: members.step_time() for key, members in model.classes.items()}))
        < 0.001
    )
    assert all(machines.num_probes(key) <= 6 for key in classes)


def test_machines_of_a_class_measure_the_same_size_first_and_different_sizes_in_later_rounds() -> None:
    machines = Machines({"host": (StepTime(0.01, 0.003), 1), "a": (StepTime(0.03, 0.02), 3)})
    probed(machines.model(), machines.measure, LIMITS)
    sizes = [size for name, size in machines.probed if name.startswith("a")]
    assert sizes[:3] == [COMPARED_SIZE] * 3
    assert sizes[3] != sizes[4]


def test_machines_whose_facts_are_alike_are_planned_by_their_speeds() -> None:
    speeds = {"host": 1.0, "a0": 0.5, "a1": 0.2, "a2": 0.1}

    def measure(sizes: Mapping[str, int]) -> dict[str, float | None]:
        return {name: StepTime(0.004, 0.002).at(size) / speeds[name] for name, size in sizes.items()}

    classes = {"host": ClassModel(("host",)), "a": ClassModel(("a0", "a1", "a2"))}
    model = FleetModel(tuple(speeds), classes, collective_cost=CollectiveCost(per_rank_s=0.01))
    model = probed(model, measure, LIMITS)
    true = [RankModel(name, StepTime(0.004, 0.002).scaled(1 / speed)) for name, speed in speeds.items()]
    chosen, best = choose_plan(model, LIMITS), find_best(true, LIMITS, model.sum_s)
    reached = predict(true, [chosen.batch_sizes[name] for name in speeds], model.sum_s(4))
    assert reached.samples_per_s > 0.99 * best.prediction.samples_per_s


def test_out_of_memory_is_a_result_and_bounds_later_probes() -> None:
    machines = Machines(EQUAL_NODES, memory={"a": 40})
    members = probed(machines.model(), machines.measure, LIMITS).classes["a"]
    assert members.too_large is not None
    assert max(members.sizes) <= 40
    assert machines.num_probes("a") <= MAX_PROBES


def test_kill_below_a_size_that_fitted_does_not_bound_the_batch() -> None:
    machines = Machines(EQUAL_NODES)

    def kill_once(sizes: Mapping[str, int]) -> dict[str, float | None]:
        is_first = not machines.probed
        times = machines.measure(sizes)
        return {**times, min(sizes, key=lambda name: (name[0], sizes[name])): None} if is_first else times

    model = probed(machines.model(), kill_once, LIMITS)
    assert model.classes["a"].too_large is None


def test_class_that_fits_at_no_size_or_in_none_of_its_probes_is_named() -> None:
    machines = Machines(EQUAL_NODES, memory={"a": 0})
    with pytest.raises(TuningError, match="a0 cannot train even 1 sample"):
        probed(machines.model(), machines.measure, LIMITS)
    with pytest.raises(TuningError, match="a cannot train 16 samples"):
        probed_class(ClassModel(("a",), too_large=1 << 20), dict.fromkeys, 4000)


@pytest.mark.parametrize("planned", [64, 65, 69, 129, 1])
def test_probe_of_half_the_planned_size_predicts_it(planned: int) -> None:
    line = StepTime(0.01, 0.02)
    members = probed_class(
        ClassModel(("a",)), lambda sizes: {name: line.at(size) for name, size in sizes.items()}, planned
    )
    assert members.step_time().at(planned) == pytest.approx(line.at(planned))
    assert members.num_new_probes <= 3


def test_trials_count_alike() -> None:
    members = ClassModel(("a",), points=(Point(8, 0.8), Point(16, 1.6), Point(32, 3.2)))
    first = members.with_trial(20, 1.21)
    both = first.with_trial(20, 1.0 / 1.1)
    assert first.in_step_factor == pytest.approx(1.21)
    assert both.in_step_factor == pytest.approx(1.21 * (1 / 1.1) ** 0.5)
    assert both.step_time().at(10) == pytest.approx(both.in_step_factor)
