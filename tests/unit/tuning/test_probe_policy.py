"""The tuner on machines that are functions: exact, noisy, short of memory, remembered."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

import pytest

from csdctl.perfmodel.prediction import RankModel, predict
from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.fit import Point
from csdctl.tuning.probe_policy import MAX_PROBES, ClassState, measure_classes
from csdctl.tuning.search import BestPlan, Limits, RankCandidate, find_best
from csdctl.tuning.stannis import TuningError

LIMITS = Limits(max_global_batch=1024)
EQUAL_NODES = {"host": (StepTime(0.01, 0.003), 1), "a": (StepTime(0.03, 0.02), 4)}
THREE_KINDS = {**EQUAL_NODES, "b": (StepTime(0.02, 0.012), 3), "c": (StepTime(0.05, 0.05), 2)}
TRIAL_STEPS = 12


class Machines:
    """A fleet of functions: `measure` is Algorithm 1's, with noise, and counts."""

    def __init__(
        self,
        kinds: Mapping[str, tuple[StepTime, int]],
        noise: Callable[[], float] = lambda: 1.0,
        memory: Mapping[str, int] | None = None,
    ) -> None:
        self.kinds = kinds
        self.kind_of = {f"{kind}{n}": kind for kind, (_, count) in kinds.items() for n in range(count)}
        self._noise = noise
        self._memory = memory or {}
        self.asked: list[tuple[str, int]] = []

    def time(self, machine: str, size: int) -> float:
        return self.kinds[self.kind_of[machine]][0].at(size) * self._noise()

    def measure(self, sizes: Mapping[str, int]) -> dict[str, float | None]:
        self.asked += sizes.items()
        return {
            machine: None
            if size > self._memory.get(self.kind_of[machine], size)
            else self.time(machine, size)
            for machine, size in sizes.items()
        }

    def states(self) -> dict[str, ClassState]:
        return {
            kind: ClassState([name for name, its in self.kind_of.items() if its == kind])
            for kind in self.kinds
        }

    def best(self, fits: Mapping[str, StepTime]) -> BestPlan:
        candidates = [
            RankCandidate(name, fits[kind], is_required=kind == "host") for name, kind in self.kind_of.items()
        ]
        return find_best(candidates, LIMITS, lambda ranks: 0.01 * ranks)

    def choose(self, fits: Mapping[str, StepTime]) -> dict[str, int]:
        sizes = self.best(fits).batch_sizes
        return {
            kind: max(sizes.get(f"{kind}{n}", 1) for n in range(self.kinds[kind][1])) for kind in self.kinds
        }

    def loss(self, chosen: BestPlan) -> float:
        """By how much the true machines are slower with `chosen` than with the true best plan."""
        true = {kind: step_time for kind, (step_time, _) in self.kinds.items()}
        models = [RankModel(name, true[self.kind_of[name]]) for name in chosen.batch_sizes]
        reached = predict(models, list(chosen.batch_sizes.values()), 0.01 * len(models))
        return 1 - reached.samples_per_s / self.best(true).prediction.samples_per_s

    def num_probes(self, kind: str) -> int:
        return sum(self.kind_of[machine] == kind for machine, _ in self.asked)


@pytest.mark.parametrize("kinds", [EQUAL_NODES, THREE_KINDS])
def test_few_probes_find_the_best_plan_of_exact_machines(kinds: dict[str, tuple[StepTime, int]]) -> None:
    machines = Machines(kinds)
    fits = measure_classes(machines.states(), machines.measure, machines.choose)
    assert machines.loss(machines.best(fits)) < 0.001
    assert all(machines.num_probes(kind) <= 6 for kind in kinds)


@dataclass(frozen=True)
class Tuned:
    """What a tuning with noise came to."""

    loss: float
    num_probes: dict[str, int]


def tuned_with_noise(kinds: Mapping[str, tuple[StepTime, int]], seed: int) -> Tuned:
    """Every probe, and every step of the trial that follows, is off by up to 20%."""
    generator = random.Random(seed)
    machines = Machines(kinds, lambda: generator.uniform(0.8, 1.2))
    states = machines.states()
    fits = measure_classes(states, machines.measure, machines.choose)
    num_probes = {kind: machines.num_probes(kind) for kind in kinds}
    tried: dict[str, list[float]] = {}
    for name, size in machines.best(fits).batch_sizes.items():
        step_s = fmean(machines.time(name, size) for _ in range(TRIAL_STEPS))
        tried.setdefault(machines.kind_of[name], []).append(step_s / fits[machines.kind_of[name]].at(size))
    for kind, ratios in tried.items():
        states[kind].learn_in_step(1, median(ratios))
    fits = {kind: fit for kind, state in states.items() if (fit := state.fit())}
    return Tuned(machines.loss(machines.best(fits)), num_probes)


@pytest.mark.parametrize("kinds", [EQUAL_NODES, THREE_KINDS])
def test_twenty_percent_of_noise_cost_at_most_three_percent(kinds: dict[str, tuple[StepTime, int]]) -> None:
    """In the mean of 60 tunings."""
    tuned = [tuned_with_noise(kinds, seed) for seed in range(60)]
    assert all(most <= MAX_PROBES for one in tuned for most in one.num_probes.values())
    assert fmean(one.loss for one in tuned) <= 0.03


def test_machines_of_a_class_measure_different_sizes_at_once() -> None:
    machines = Machines({"host": (StepTime(0.01, 0.003), 1), "a": (StepTime(0.03, 0.02), 3)})
    measure_classes(machines.states(), machines.measure, machines.choose)
    first = dict(machines.asked[:4])
    assert len({first[name] for name in ("a0", "a1", "a2")}) == 3


def test_what_does_not_fit_is_a_result_and_bounds_what_is_asked() -> None:
    machines = Machines(EQUAL_NODES, memory={"a": 40})
    states = machines.states()
    measure_classes(states, machines.measure, machines.choose)
    assert states["a"].too_large is not None
    assert max(states["a"].sizes) <= 40
    assert machines.num_probes("a") <= MAX_PROBES


def test_smaller_size_than_one_that_fits_died_of_something_else() -> None:
    machines = Machines(EQUAL_NODES)
    states = machines.states()

    def kill_once(sizes: Mapping[str, int]) -> dict[str, float | None]:
        is_first = not machines.asked
        times = machines.measure(sizes)
        return {**times, min(sizes, key=lambda name: (name[0], sizes[name])): None} if is_first else times

    measure_classes(states, kill_once, machines.choose)
    assert states["a"].too_large is None


def test_class_that_fits_at_no_size_is_an_error() -> None:
    machines = Machines(EQUAL_NODES, memory={"a": 0})
    states = machines.states()
    with pytest.raises(TuningError, match="a0 cannot train even 1 sample"):
        measure_classes(states, machines.measure, machines.choose)


def test_remembered_classes_are_not_measured_again() -> None:
    machines = Machines(THREE_KINDS)
    states = machines.states()
    fits = measure_classes(states, machines.measure, machines.choose)
    machines.asked.clear()
    again = machines.states()
    for kind, state in again.items():
        state.probes = list(states[kind].probes)
    assert measure_classes(again, machines.measure, machines.choose) == fits
    assert machines.asked == []


def test_guess_from_a_similar_model_is_where_probing_begins() -> None:
    machines = Machines(EQUAL_NODES)
    states = machines.states()
    for kind, state in states.items():
        state.guess = EQUAL_NODES[kind][0].scaled(1.3)
    measure_classes(states, machines.measure, machines.choose)
    planned = machines.choose({kind: one for kind, (one, _) in EQUAL_NODES.items()})
    first = dict(machines.asked[:4])
    assert 0.25 * planned["a"] < max(first[name] for name in ("a0", "a1", "a2")) < 2 * planned["a"]
    assert machines.num_probes("host") <= 4


@pytest.mark.parametrize("target", [64, 65, 69, 129, 1])
def test_probe_of_half_the_planned_size_tells_of_it(target: int) -> None:
    state = ClassState(["a"])
    line = StepTime(0.01, 0.02)
    fits = measure_classes(
        {"a": state},
        lambda sizes: {name: line.at(size) for name, size in sizes.items()},
        lambda _: {"a": target},
    )
    assert fits["a"].at(target) == pytest.approx(line.at(target))
    assert state.num_new <= 3


def test_class_that_finds_no_size_in_all_its_probes_is_named() -> None:
    state = ClassState(["a"], max_new=2, guess=StepTime(0.01, 0.0001))
    with pytest.raises(TuningError, match="a cannot train"):
        measure_classes({"a": state}, dict.fromkeys, lambda _: {"a": 4000})


def test_trials_count_alike() -> None:
    state = ClassState(["a"], probes=[Point(8, 0.8), Point(16, 1.6), Point(32, 3.2)])
    for ratio in (1.21, 1.0 / 1.1):
        before = state.in_step
        state.learn_in_step(20, ratio)
    assert before == pytest.approx(1.21)
    assert state.in_step == pytest.approx(1.21 * (1 / 1.1) ** 0.5)
    fit = state.fit()
    assert fit is not None
    assert fit.at(10) == pytest.approx(state.in_step)
