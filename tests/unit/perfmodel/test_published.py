"""Table II of the STANNIS paper from Table I, one speed-up and one pair of powers.

What comes out stands in docs/explanation/the-papers-figures.md, which is held against it here.
"""

from pathlib import Path

import numpy as np
import pytest

from csdctl.perfmodel.prediction import CollectiveCost, RingCost, SumCost
from csdctl.perfmodel.published import (
    LARGEST_SPEEDUP,
    NEWPORT_POWER_W,
    NEWPORT_RING,
    TABLE_1,
    Network,
)
from csdctl.tuning.scaling_curve import Costs, CurvePoint, predict_curve

MOBILENET = TABLE_1[Network.MOBILENETV2]
JOULES = {0: 13.10, 4: 8.30, 8: 6.84, 16: 5.05, 24: 4.02}
"""Table II: energy per image, by the number of CSDs; without any, the server has ordinary SSDs."""
FLOPS_PER_WATT = (5.87e6, 7.05e6, 8.18e6, 10.37e6, 12.26e6)
WITH_NEWPORTS = [4, 8, 16, 24]
PAGE = (Path(__file__).parents[3] / "docs/explanation/the-papers-figures.md").read_text()


def points(network: Network, cost: SumCost = NEWPORT_RING) -> list[CurvePoint]:
    row = TABLE_1[network]
    return predict_curve(row.host, [row.node], range(25), Costs(cost, row.gradient_bytes))


def rates(cost: SumCost = NEWPORT_RING) -> dict[int, float]:
    """Images per second with each of Table II's numbers of CSDs."""
    return {count: points(Network.MOBILENETV2, cost)[count].samples_per_s for count in JOULES}


def fit_ring(speedup: float) -> RingCost:
    """The ring with which 24 Newports reach `speedup`."""
    (free,) = predict_curve(MOBILENET.host, [MOBILENET.node], [24], Costs(CollectiveCost()))
    sum_s = free.global_batch / (speedup * MOBILENET.host_samples_per_s) - free.step_s
    return RingCost(sum_s / RingCost(1.0).at(MOBILENET.gradient_bytes, 25))


def fit_power(joules: dict[int, float], rate: dict[int, float]) -> np.ndarray:
    """Host and node power by least squares of relative errors in energy per image."""
    rows = [[1 / (energy * rate[count]), count / (energy * rate[count])] for count, energy in joules.items()]
    return np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]


def errors(rate: dict[int, float]) -> dict[int, float]:
    """Computed over published energy, less 1, with the pair fitted to the columns that have Newports."""
    host_w, node_w = fit_power({count: JOULES[count] for count in WITH_NEWPORTS}, rate)
    return {count: (host_w + count * node_w) / rate[count] / JOULES[count] - 1 for count in JOULES}


def test_constants_are_those_that_are_fitted() -> None:
    assert fit_ring(LARGEST_SPEEDUP).per_byte_s == pytest.approx(NEWPORT_RING.per_byte_s, rel=1e-6)
    pair = fit_power({count: JOULES[count] for count in WITH_NEWPORTS}, rates())
    assert [*pair, 13.10 * 31.05] == pytest.approx(NEWPORT_POWER_W, rel=1e-5)
    assert f"{NEWPORT_POWER_W[0]:.1f} W" in PAGE
    assert f"{NEWPORT_POWER_W[1]:.2f} W" in PAGE


@pytest.mark.parametrize("network", sorted(set(Network) - {Network.MOBILENETV2}))
def test_only_mobilenet_can_reach_2_7(network: Network) -> None:
    # Even a sum that takes no time leaves the others below: a step lasts as long as the host's batch.
    assert points(network, CollectiveCost())[24].speedup < 2.42


def test_margin_alone_leaves_2_9_of_the_3_4_that_the_devices_add_up_to() -> None:
    free = points(Network.MOBILENETV2, CollectiveCost())[24]
    assert (free.speedup, free.speedup / free.efficiency) == pytest.approx((2.905, 3.381), abs=0.001)
    assert points(Network.MOBILENETV2)[24].sum_s == pytest.approx(0.769, abs=0.001)


def test_slowdown_fades_out_beyond_5_or_6_nodes_as_in_the_paper() -> None:
    steps = [point.step_s for point in points(Network.MOBILENETV2)]
    assert steps[6] - steps[0] > 0.85 * (steps[24] - steps[0])


def test_networks_are_in_the_papers_order() -> None:
    # "smaller networks get better speedup than the larger ones", "SqueezeNet gets less than MobileNetV2"
    speedups = {network: points(network)[24].speedup for network in Network}
    order = sorted(speedups, key=lambda network: -speedups[network])
    assert order == [Network.MOBILENETV2, Network.SQUEEZENET, Network.NASNET, Network.INCEPTIONV3]
    for network, speedup in speedups.items():
        assert f"{TABLE_1[network].title} {speedup:.2f} ×" in PAGE


@pytest.mark.parametrize(
    ("cost", "most"),
    [
        *((fit_ring(speedup), 0.005) for speedup in (2.65, 2.7, 2.75)),
        (CollectiveCost(fixed_s=0.769), 0.02),
        (CollectiveCost(per_rank_s=0.769 / 24), 0.02),
        (CollectiveCost(), 0.02),
    ],
)
def test_table_2_does_not_depend_on_the_collective(cost: SumCost, most: float) -> None:
    assert all(abs(errors(rates(cost))[count]) < most for count in WITH_NEWPORTS)


def test_ideal_rates_fit_the_cells_too_but_not_the_speedup() -> None:
    ideal = {count: 31.05 + 3.08 * count for count in JOULES}
    assert max(abs(errors(ideal)[count]) for count in WITH_NEWPORTS) < 0.015
    assert ideal[24] / ideal[0] > 3.3


def test_page_shows_what_is_computed() -> None:
    rate, found = rates(), errors(rates())
    for count in WITH_NEWPORTS:
        computed = JOULES[count] * (1 + found[count])
        difference = f"{found[count]:+.1%}".replace("-", "−")
        cells = count, f"{JOULES[count]:.2f}", f"{rate[count]:.1f}", f"{computed:.2f}", difference
        assert "| " + " | ".join(map(str, cells)) + " |" in PAGE


def test_server_without_newports_is_22_percent_off_because_it_is_another_machine() -> None:
    assert errors(rates())[0] == pytest.approx(-0.221, abs=0.001)
    host_w, _, alone_w = NEWPORT_POWER_W
    assert alone_w - host_w == pytest.approx(90.0, abs=0.1)


def test_no_pair_gives_all_five_cells_within_5_percent_at_any_possible_rate() -> None:
    # Nodes draw no less than nothing, so 4 CSDs draw at least what none do; even if none ever waited,
    # they would be too slow for that to be 8.30 J an image.
    least_alone_w = 0.95 * JOULES[0] * MOBILENET.host_samples_per_s
    assert least_alone_w / (MOBILENET.host_samples_per_s + 4 * MOBILENET.node_samples_per_s) > 1.05 * 8.30
    # With nodes below 0 W: cells of 0 and 4 CSDs leave so little for 24 that they would have to be slow.
    most_with_4_w = 1.05 * JOULES[4] * rates(CollectiveCost())[4]
    most_with_24_w = least_alone_w + 6 * (most_with_4_w - least_alone_w)
    assert most_with_24_w / (0.95 * JOULES[24]) / MOBILENET.host_samples_per_s < 2


def test_flops_per_watt_contradicts_the_energies_and_fits_a_pair_of_its_own() -> None:
    # flop/s/W × J/image = flop/image: one number for one network, and it falls by a third.
    flop = [flops * joules for flops, joules in zip(FLOPS_PER_WATT, JOULES.values(), strict=True)]
    assert flop == sorted(flop, reverse=True)
    assert [flop[-1] / flop[0], flop[-1] / flop[1]] == pytest.approx([0.64, 0.84], abs=0.005)
    energies = {count: 1 / flops for count, flops in zip(JOULES, FLOPS_PER_WATT, strict=True)}
    rate = rates()
    host_w, node_w = fit_power(energies, rate)  # in joules of an unknown unit
    for count, joules in energies.items():
        assert (host_w + count * node_w) / rate[count] == pytest.approx(joules, rel=0.02)
    assert node_w / host_w == pytest.approx(0.012, abs=0.001)
