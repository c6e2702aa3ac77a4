"""A grid of host and node batch sizes, and the speed of its points, measured alternately with a plan."""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.running import CLIENTS
from csdctl.tuning.plan import load_plan
from tests.lab.project import Project

Sizes = tuple[int, ...]
"""Batch sizes by rank, the host's first."""

ON_LIMIT = (1 / 32, 1 / 16, 3 / 32, 7 / 64, 1 / 8, 9 / 64, 3 / 16)
"""Batch sizes of a node, as shares of the limit; the host takes the rest."""
BELOW = (1 / 16, 3 / 32, 1 / 8, 3 / 16)
HOST_SHARES = (0.75, 0.5)
"""For the shares in BELOW, the host takes these fractions of the rest."""
SHARES_OF_UNEQUAL = (0.2, 0.3, 0.4, 0.5)
"""Shares of the limit of unequal nodes together, with weights that are right."""
FACTORS = (0.6, 1.6)
"""How far one node's weight is wrong."""
MIN_STEPS = 2
CLIENT = CLIENTS / "grid_client.py"


def grid_points(limit: int, num_nodes: int) -> list[Sizes]:
    """Return points with a global batch of at most `limit`: extreme points, and many at the limit."""
    pairs = [(share, 1.0) for share in ON_LIMIT]
    pairs += [(share, of_rest) for share in BELOW for of_rest in HOST_SHARES]
    points = []
    for share, of_rest in pairs:
        node = max(1, round(limit * share))
        points.append((max(1, round((limit - num_nodes * node) * of_rest)), *[node] * num_nodes))
    return list(dict.fromkeys(points))


def unequal_grid_points(limit: int, weights: Sequence[float]) -> list[Sizes]:
    """Return points with a global batch of `limit`: nodes by weight, and with one wrong weight."""
    points = []
    for share in SHARES_OF_UNEQUAL:
        for wrong, factor in [(0, 1.0), *product(range(len(weights)), FACTORS)]:
            nodes = [weight * (factor if n == wrong else 1.0) for n, weight in enumerate(weights)]
            sizes = [max(1, round(limit * share * weight / sum(weights))) for weight in nodes]
            points.append((limit - sum(sizes), *sizes))
    return list(dict.fromkeys(points))


@dataclass(frozen=True)
class Visits:
    """The samples/s of each visit, by point."""

    speeds: dict[Sizes, list[float]]

    def median(self, point: Sizes) -> float:
        return statistics.median(self.speeds[point])

    def best(self, count: int, excluded: Sizes) -> list[Sizes]:
        """Return the fastest points, fastest first."""
        return sorted((point for point in self.speeds if point != excluded), key=self.median, reverse=True)[
            :count
        ]

    def print(self) -> None:
        for point in sorted(self.speeds, key=self.median, reverse=True):
            runs = ", ".join(f"{speed:.1f}" for speed in self.speeds[point])
            shown = f"{point[0]} + {' '.join(map(str, point[1:]))}"
            print(f"  {shown:28} = {sum(point):4}: {self.median(point):7.1f} samples/s  ({runs})")


def visit(
    project: Project, job: str, fleet: str, plan_path: Path, order: Sequence[Sizes], seconds: float
) -> Visits:
    """Measure the points of `order` in sequence, each for `seconds`, in one run of all ranks.

    Threads and other settings are those of the plan.
    """
    sample_times_s = [1 / rank.samples_per_s for rank in load_plan(plan_path).ranks if rank.samples_per_s]

    def num_steps(point: Sizes) -> int:
        step_s = max(size * sample_s for size, sample_s in zip(point, sample_times_s, strict=True))
        return max(MIN_STEPS, math.ceil(seconds / step_s))

    visits = [(point, num_steps(point)) for point in order]
    done = project.lab.host.run(
        *(sys.executable, str(CLIENT), f"{job}.yaml", fleet, str(plan_path), json.dumps(visits)),
        cwd=project.path,
    )
    assert done.returncode == 0, done.stderr
    measured: dict[Sizes, list[float]] = {}
    for point, step_s in zip(order, json.loads(done.stdout), strict=True):
        measured.setdefault(point, []).append(sum(point) / step_s)
    return Visits(measured)


def with_between(points: Sequence[Sizes], between: Sizes, times: int) -> list[Sizes]:
    """Return `points` with `between` inserted `times` times, evenly from the start to the end."""
    order = list(points)
    for number in reversed(range(times)):
        order.insert(round(number * len(points) / (times - 1)), between)
    return order
