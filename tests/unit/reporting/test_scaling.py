"""Runs with different numbers of nodes: what is compared, with what, and what is not known."""

import dataclasses

from csdctl.reporting.energy import MachineEnergy, RunEnergy
from csdctl.reporting.results import RankSummary
from csdctl.reporting.tables import KINDS, build_scaling, energy_by_nodes
from tests.unit.reporting.test_page import results

HOST, NODE = 30.0, 3.0
"""Samples per second alone, as MobileNetV2 in Table I."""
ENERGY = {0: 13.1, 4: 8.3, 24: 4.02}
"""Joules per image of Table II."""


def run(num_nodes, *, batch=None, tuned=True, joules=None):
    """A run whose ranks reach 90% of what they reach alone, as soon as there are nodes."""
    alone = [HOST] + [NODE] * num_nodes
    rate = sum(alone) * (0.9 if num_nodes else 1.0)
    ranks = tuple(
        RankSummary(
            number,
            f"csd{number - 1}" if number else "host",
            batch or (100 if number == 0 else 10),
            num_private=0,
            num_public=0,
            samples_per_s=0.0,
            alone_samples_per_s=each if tuned else None,
            compute_s=0.0,
            wait_s=0.0,
        )
        for number, each in enumerate(alone)
    )
    energy = None
    if joules:
        whole = MachineEnergy("whole", "ipmi", "measured", 100.0, joules * rate * 100, 100.0)
        whole.samples = round(rate * 100)
        energy = RunEnergy((whole,), whole, ())
    base = results(f"20260101-00000{num_nodes % 10}-{num_nodes}")
    summary = dataclasses.replace(
        base.summary,
        ranks=ranks,
        samples_per_s=rate,
        global_batch=sum(rank.batch_size for rank in ranks),
        energy=energy,
        lost_nodes=(),
    )
    return dataclasses.replace(base, summary=summary)


class TestScaling:
    def test_speedup_is_over_the_run_without_nodes(self):
        series = build_scaling([run(24), run(0), run(4)], "weak")
        assert [point.num_nodes for point in series.points] == [0, 4, 24]
        assert [round(point.speedup, 3) for point in series.points] == [1.0, 1.26, 3.06]
        assert [round(point.efficiency, 3) for point in series.points] == [1.0, 0.9, 0.9]
        assert (series.host_source, series.kind) == ("runs without nodes", KINDS["weak"])

    def test_energy_is_saved_as_in_table_2_of_the_paper(self):
        rows = energy_by_nodes(build_scaling([run(n, joules=e) for n, e in ENERGY.items()], "weak")).rows
        assert [row[:3] for row in rows] == [
            ("0", "13.1", "0%"),
            ("4", "8.3", "37%"),
            ("24", "4.02", "69%"),
        ]
