"""A grid of host and node batch sizes, and the speed of its points, measured in turns with a plan."""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.tuning.plan import load_plan
from tests.bench.tuned import DEADLINE_S
from tests.lab.project import Project

Sizes = tuple[int, ...]
"""Batch sizes by rank, the host's first."""

ON_LIMIT = (1 / 32, 1 / 16, 3 / 32, 7 / 64, 1 / 8, 9 / 64, 3 / 16)
"""Batch sizes of a node, as shares of the limit; the host takes what is left of it."""
BELOW = (1 / 16, 3 / 32, 1 / 8, 3 / 16)
HOST_SHARES = (0.75, 0.5)
"""And of these, with the host at so much of what is left."""
NUM_SKIPPED = 1
"""Steps at the begin of a visit that do not count: TensorFlow makes its kernels for new batch sizes."""
LEAST_STEPS = 2
CLIENT = Path(__file__).parent / "clients" / "grid_client.py"


def grid_points(limit: int, num_nodes: int) -> list[Sizes]:
    """Points with a global batch within `limit`, the extreme ones and many on it."""
    pairs = [(share, 1.0) for share in ON_LIMIT]
    pairs += [(share, of_rest) for share in BELOW for of_rest in HOST_SHARES]
    points = []
    for share, of_rest in pairs:
        node = max(1, round(limit * share))
        points.append((max(1, round((limit - num_nodes * node) * of_rest)), *[node] * num_nodes))
    return list(dict.fromkeys(points))


@dataclass(frozen=True)
class Visits:
    """What was measured at each point: samples/s of each visit."""

    speeds: dict[Sizes, list[float]]

    def middle(self, point: Sizes) -> float:
        return statistics.median(self.speeds[point])

    def best(self, count: int, but: Sizes) -> list[Sizes]:
        """The fastest points, fastest first."""
        return sorted((one for one in self.speeds if one != but), key=self.middle, reverse=True)[:count]

    def tell(self) -> None:
        for point in sorted(self.speeds, key=self.middle, reverse=True):
            runs = ", ".join(f"{one:.1f}" for one in self.speeds[point])
            shown = f"{point[0]} + {' '.join(map(str, point[1:]))}"
            print(f"  {shown:28} = {sum(point):4}: {self.middle(point):7.1f} samples/s  ({runs})")


def visit(project: Project, job: str, plan_path: Path, order: Sequence[Sizes], seconds: float) -> Visits:
    """Measure the points of `order` one after another, each for so long, in one trial of all ranks.

    Threads and other settings are those of the plan.
    """
    apart = [1 / rank.samples_per_s for rank in load_plan(plan_path).ranks if rank.samples_per_s]

    def num_steps(point: Sizes) -> int:
        step_s = max(size * a_sample_s for size, a_sample_s in zip(point, apart, strict=True))
        return NUM_SKIPPED + max(LEAST_STEPS, math.ceil(seconds / step_s))

    visits = [(point, num_steps(point)) for point in order]
    done = project.lab.host.run(
        *(sys.executable, str(CLIENT), f"{job}.yaml", str(plan_path), json.dumps(visits)),
        cwd=project.path,
        deadline_s=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    measured: dict[Sizes, list[float]] = {}
    for point, steps in zip(order, json.loads(done.stdout), strict=True):
        counted = steps[NUM_SKIPPED:]
        measured.setdefault(point, []).append(sum(point) * len(counted) / sum(counted))
    return Visits(measured)


def with_between(points: Sequence[Sizes], between: Sizes, times: int) -> list[Sizes]:
    """`points`, and `between` at the begin, at the end and evenly in between, `times` in all."""
    order = list(points)
    for number in reversed(range(times)):
        order.insert(round(number * len(points) / (times - 1)), between)
    return order
