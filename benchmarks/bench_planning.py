"""The time to plan a thousand nodes, and the cost of noisy probes: the pure part of tuning.

make bench ARGS="-k planning"
"""

import statistics
import time
from collections.abc import Mapping
from random import Random

import pytest

from csdctl.perfmodel.prediction import RankModel, StepTime
from csdctl.tuning.search import Limits, find_best
from tests.unit.tuning.test_plan_choice import EQUAL_NODES, FOUR_CLASSES, LIMITS, Machines, probed

ROUNDS = 5
SEEDS = range(200)
TRIAL_STEPS = 12


class NoisyMachines(Machines):
    """Machines of which every probe, and every step of a trial, is off by up to 20%."""

    def __init__(self, classes: Mapping[str, tuple[StepTime, int]], seed: int) -> None:
        super().__init__(classes)
        self._random = Random(seed)

    def time(self, machine: str, size: int) -> float:
        return super().time(machine, size) * self._random.uniform(0.8, 1.2)

    def loss_after_tuning(self) -> float:
        """Return by how much the plan is slower than the best one, after one trial."""
        model = probed(self.model(), self.measure, LIMITS)
        step_times = {key: members.step_time() for key, members in model.classes.items()}
        tried: dict[str, list[float]] = {}
        for name, size in self.best(step_times).batch_sizes.items():
            step_s = statistics.fmean(self.time(name, size) for _ in range(TRIAL_STEPS))
            key = self.class_of[name]
            tried.setdefault(key, []).append(step_s / step_times[key].at(size))
        for key, ratios in tried.items():
            model = model.with_class(key, model.classes[key].with_trial(1, statistics.median(ratios)))
        return self.loss(self.best({key: members.step_time() for key, members in model.classes.items()}))


@pytest.mark.parametrize("num_classes", [3, 1000])
def test_planning_a_thousand_nodes(num_classes: int) -> None:
    classes = [StepTime(0.01 + k * 1e-5, 0.02 + k * 1e-5) for k in range(num_classes)]
    fleet = [RankModel("host", StepTime(0.01, 0.003), is_required=True)]
    fleet += [RankModel(f"csd{k}", classes[k % num_classes]) for k in range(1000)]
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        find_best(fleet, Limits(max_global_batch=50_000), lambda ranks: 1e-4 * ranks)
        times.append(time.perf_counter() - started)
    print(f"\n1000 nodes of {num_classes} classes: {statistics.median(times):.2f} s (max {max(times):.2f})")


@pytest.mark.parametrize("name", ["equal nodes", "four classes"])
def test_planning_with_noise(name: str) -> None:
    classes = EQUAL_NODES if name == "equal nodes" else FOUR_CLASSES
    losses = sorted(NoisyMachines(classes, seed).loss_after_tuning() for seed in SEEDS)
    averages = f"mean {statistics.fmean(losses):.2%}, median {statistics.median(losses):.2%}"
    print(f"\n20% noise, {name}: loss {averages}, nine of ten below {losses[len(losses) * 9 // 10]:.2%}")
