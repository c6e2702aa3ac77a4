"""Table II of the STANNIS paper from Table I, one speed-up and one pair of powers.

What comes out stands in docs/explanation/the-papers-figures.md, which is held against it here.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from csdctl.perfmodel.prediction import CollectiveCost
from csdctl.tuning.scaling_curve import CurvePoint, ScalableFleet, predict_curve
from tests.unit.perfmodel.published import (
    BYTES_PER_PARAMETER,
    LARGEST_SPEEDUP,
    NEWPORT_POWER_W,
    NEWPORT_RING,
    TABLE_1,
    Network,
    RingCost,
)

MOBILENET = TABLE_1[Network.MOBILENETV2]
JOULES = {0: 13.10, 4: 8.30, 8: 6.84, 16: 5.05, 24: 4.02}
"""Table II: energy per image, by the number of CSDs; without any, the server has ordinary SSDs."""
WITH_NEWPORTS = [4, 8, 16, 24]
PAGE = (Path(__file__).parents[3] / "docs/explanation/the-papers-figures.md").read_text()


def points(network: Network, cost: CollectiveCost = NEWPORT_RING) -> list[CurvePoint]:
    row = TABLE_1[network]
    vector_bytes = BYTES_PER_PARAMETER * row.num_parameters
    return predict_curve(ScalableFleet(row.host, (row.node,), cost, vector_bytes), range(25))


def rates(cost: CollectiveCost = NEWPORT_RING) -> dict[int, float]:
    """Images per second with each of Table II's numbers of CSDs."""
    return {count: points(Network.MOBILENETV2, cost)[count].samples_per_s for count in JOULES}


def fit_power(joules: dict[int, float], rate: dict[int, float]) -> np.ndarray:
    """Host and node power by least squares of relative errors in energy per image."""
    rows = [[1 / (energy * rate[count]), count / (energy * rate[count])] for count, energy in joules.items()]
    return np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]


def errors(rate: dict[int, float]) -> dict[int, float]:
    """Computed over published energy, less 1, with the pair fitted to the columns that have Newports."""
    host_w, node_w = fit_power({count: JOULES[count] for count in WITH_NEWPORTS}, rate)
    return {count: (host_w + count * node_w) / rate[count] / JOULES[count] - 1 for count in JOULES}


def test_constants_are_those_that_are_fitted() -> None:
    """The ring is that with which 24 Newports reach the largest speedup."""
    (free,) = predict_curve(ScalableFleet(MOBILENET.host, (MOBILENET.node,)), [24])
    sum_s = free.global_batch / (LARGEST_SPEEDUP * MOBILENET.host_samples_per_s) - free.step_s
    per_byte_s = sum_s / RingCost(per_byte_s=1.0).at(BYTES_PER_PARAMETER * MOBILENET.num_parameters, 25)
    assert per_byte_s == pytest.approx(NEWPORT_RING.per_byte_s, rel=1e-6)
    pair = fit_power({count: JOULES[count] for count in WITH_NEWPORTS}, rates())
    assert [*pair, 13.10 * 31.05] == pytest.approx(NEWPORT_POWER_W, rel=1e-5)
    assert f"{NEWPORT_POWER_W[0]:.1f} W" in PAGE
    assert f"{NEWPORT_POWER_W[1]:.2f} W" in PAGE


def test_networks_are_in_the_papers_order() -> None:
    # "smaller networks get better speedup than the larger ones", "SqueezeNet gets less than MobileNetV2"
    speedups = {network: points(network)[24].speedup for network in Network}
    order = sorted(speedups, key=lambda network: -speedups[network])
    assert order == [Network.MOBILENETV2, Network.SQUEEZENET, Network.NASNET, Network.INCEPTIONV3]
    assert speedups.pop(Network.MOBILENETV2) == pytest.approx(LARGEST_SPEEDUP)  # the ring is fitted to it
    for network, speedup in speedups.items():
        assert re.search(rf"{TABLE_1[network].title}( reaches)? {speedup:.2f} ×", PAGE)


def test_page_shows_what_is_computed() -> None:
    rate, found = rates(), errors(rates())
    for count in WITH_NEWPORTS:
        computed = JOULES[count] * (1 + found[count])
        difference = f"{found[count]:+.1%}".replace("-", "−")
        cells = count, f"{JOULES[count]:.2f}", f"{rate[count]:.1f}", f"{computed:.2f}", difference
        assert "| " + " | ".join(map(str, cells)) + " |" in PAGE
