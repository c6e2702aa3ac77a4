"""Table II of the STANNIS paper from Table I, one speed-up and one pair of powers.

What comes out stands in docs/explanation/the-papers-figures.md, which is held against it here.
"""

import itertools
from pathlib import Path

import pytest

from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.energy import fit_power
from csdctl.perfmodel.published import TABLE_1, TABLE_2, Network
from csdctl.perfmodel.published_fits import fit_newport_power, fit_ring, predict_published
from csdctl.perfmodel.ring import SumCost
from csdctl.perfmodel.scaling import predict_curve

MOBILENET = TABLE_1[Network.MOBILENETV2]
WITH_NEWPORTS = [energy for energy in TABLE_2 if energy.num_nodes]
ORDINARY = TABLE_2[0]
PAGE = (Path(__file__).parents[3] / "docs/explanation/the-papers-figures.md").read_text()


def rates(cost: SumCost) -> dict[int, float]:
    """Images per second with each of Table II's numbers of CSDs."""
    curve = predict_curve(MOBILENET.host, [MOBILENET.node], 24, cost, gradient_bytes=MOBILENET.gradient_bytes)
    return {energy.num_nodes: curve[energy.num_nodes].samples_per_s for energy in TABLE_2}


def errors(rate: dict[int, float]) -> dict[int, float]:
    """Computed over published energy, less 1, with the pair fitted to the columns that have Newports."""
    power = fit_power(
        [energy.num_nodes for energy in WITH_NEWPORTS],
        [energy.joules_per_image for energy in WITH_NEWPORTS],
        [rate[energy.num_nodes] for energy in WITH_NEWPORTS],
    )
    return {
        energy.num_nodes: power.at(energy.num_nodes) / rate[energy.num_nodes] / energy.joules_per_image - 1
        for energy in TABLE_2
    }


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


class TestSpeedup:
    @pytest.mark.parametrize("network", sorted(set(Network) - {Network.MOBILENETV2}))
    def test_only_mobilenet_can_reach_2_7(self, network: Network) -> None:
        # Even a sum that takes no time leaves the others below: a step lasts as long as the host's batch.
        assert predict_published(TABLE_1[network], 24, fit_ring(speedup=2.9))[24].speedup < 2.7
        free = predict_curve(TABLE_1[network].host, [TABLE_1[network].node], 24, CollectiveCost())
        assert free[24].speedup < 2.42

    def test_margin_alone_leaves_2_9_of_the_3_4_that_the_devices_add_up_to(self) -> None:
        free = predict_curve(MOBILENET.host, [MOBILENET.node], 24, CollectiveCost())[24]
        assert free.speedup == pytest.approx(2.905, abs=0.001)
        assert free.speedup / free.efficiency == pytest.approx(3.381, abs=0.001)

    def test_ring_is_fitted_to_the_published_speedup(self) -> None:
        points = predict_published(MOBILENET, 24, fit_ring())
        assert points[24].speedup == pytest.approx(2.7)
        assert points[24].sum_s == pytest.approx(0.769, abs=0.001)

    def test_speedup_beyond_the_margin_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cannot reach 3.0 times"):
            fit_ring(speedup=3.0)

    def test_slowdown_fades_out_beyond_5_or_6_nodes_as_in_the_paper(self) -> None:
        points = predict_published(MOBILENET, 24, fit_ring())
        slowing = [after.step_s - before.step_s for before, after in itertools.pairwise(points)]
        assert sum(slowing[:6]) > 0.85 * sum(slowing)

    def test_networks_are_in_the_papers_order(self) -> None:
        # "smaller networks get better speedup than the larger ones", "SqueezeNet gets less than MobileNetV2"
        speedups = {
            network: predict_published(TABLE_1[network], 24, fit_ring())[24].speedup for network in Network
        }
        order = sorted(speedups, key=lambda network: -speedups[network])
        assert order == [Network.MOBILENETV2, Network.SQUEEZENET, Network.NASNET, Network.INCEPTIONV3]
        for network, speedup in speedups.items():
            assert f"{TABLE_1[network].title} {speedup:.2f} ×" in PAGE


class TestEnergy:
    def test_every_cell_with_newports_is_within_half_a_percent(self) -> None:
        assert all(abs(errors(rates(fit_ring()))[energy.num_nodes]) < 0.005 for energy in WITH_NEWPORTS)

    @pytest.mark.parametrize("speedup", [2.65, 2.7, 2.75])
    def test_rounding_of_the_published_speedup_does_not_matter(self, speedup: float) -> None:
        found = errors(rates(fit_ring(speedup=speedup)))
        assert all(abs(found[energy.num_nodes]) < 0.005 for energy in WITH_NEWPORTS)

    @pytest.mark.parametrize(
        "cost", [CollectiveCost(fixed_s=0.769), CollectiveCost(per_rank_s=0.769 / 24), CollectiveCost()]
    )
    def test_table_2_does_not_depend_on_the_collective(self, cost: CollectiveCost) -> None:
        found = errors(rates(cost))
        assert all(abs(found[energy.num_nodes]) < 0.02 for energy in WITH_NEWPORTS)

    def test_ideal_rates_fit_the_cells_too_but_not_the_speedup(self) -> None:
        ideal = {energy.num_nodes: 31.05 + 3.08 * energy.num_nodes for energy in TABLE_2}
        assert max(abs(errors(ideal)[energy.num_nodes]) for energy in WITH_NEWPORTS) < 0.015
        assert ideal[24] / ideal[0] > 3.3

    def test_page_shows_what_is_computed(self) -> None:
        power, rate, found = fit_newport_power(), rates(fit_ring()), errors(rates(fit_ring()))
        for energy in WITH_NEWPORTS:
            computed = power.at(energy.num_nodes) / rate[energy.num_nodes]
            shown = row(
                energy.num_nodes,
                f"{energy.joules_per_image:.2f}",
                f"{rate[energy.num_nodes]:.1f}",
                f"{computed:.2f}",
                f"{found[energy.num_nodes]:+.1%}".replace("-", "−"),
            )
            assert shown in PAGE
        assert f"{power.host_w:.1f} W" in PAGE
        assert f"{power.node_w:.2f} W" in PAGE

    def test_server_without_newports_is_22_percent_off_because_it_is_another_machine(self) -> None:
        assert errors(rates(fit_ring()))[0] == pytest.approx(-0.221, abs=0.001)
        power = fit_newport_power()
        assert power.without_nodes_w == pytest.approx(13.10 * 31.05)
        assert power.at(0) - power.host_w == pytest.approx(90.0, abs=0.1)

    def test_no_pair_gives_all_five_cells_within_5_percent_at_any_possible_rate(self) -> None:
        # Nodes draw no less than nothing, so 4 CSDs draw at least what none do; even if none ever waited,
        # they would be too slow for that to be 8.30 J an image.
        least_power_w = 0.95 * ORDINARY.joules_per_image * MOBILENET.host_samples_per_s
        most_samples_per_s = MOBILENET.host_samples_per_s + 4 * MOBILENET.node_samples_per_s
        assert least_power_w / most_samples_per_s > 1.05 * WITH_NEWPORTS[0].joules_per_image

    def test_newport_in_place_of_an_ssd_that_draws_more_does_not_either(self) -> None:
        # With nodes below 0 W: cells of 0 and 4 CSDs leave so little for 24 that they would have to be slow.
        least_alone_w = 0.95 * ORDINARY.joules_per_image * MOBILENET.host_samples_per_s
        rate = rates(CollectiveCost())  # at most
        most_with_4_w = 1.05 * WITH_NEWPORTS[0].joules_per_image * rate[4]
        most_with_24_w = least_alone_w + 6 * (most_with_4_w - least_alone_w)
        most_samples_per_s = most_with_24_w / (0.95 * WITH_NEWPORTS[-1].joules_per_image)
        assert most_samples_per_s / MOBILENET.host_samples_per_s < 2


class TestTheOtherRows:
    def test_savings_follow_from_the_energies_within_a_percentage_point(self) -> None:
        savings = [1 - energy.joules_per_image / ORDINARY.joules_per_image for energy in TABLE_2]
        assert savings == pytest.approx([energy.saving for energy in TABLE_2], abs=0.006)

    def test_flops_per_watt_contradicts_the_energies(self) -> None:
        # flop/s/W × J/image = flop/image: one number for one network, and it falls by a third.
        flop = [energy.flops_per_watt * energy.joules_per_image for energy in TABLE_2]
        assert flop == sorted(flop, reverse=True)
        assert flop[-1] / flop[0] == pytest.approx(0.64, abs=0.005)
        assert flop[-1] / flop[1] == pytest.approx(0.84, abs=0.005)

    def test_flops_per_watt_fits_one_pair_in_all_five_cells(self) -> None:
        rate = rates(fit_ring())
        counts = [energy.num_nodes for energy in TABLE_2]
        energies = [1 / energy.flops_per_watt for energy in TABLE_2]  # in joules of an unknown unit
        power = fit_power(counts, energies, [rate[count] for count in counts])
        for energy, joules in zip(TABLE_2, energies, strict=True):
            assert power.at(energy.num_nodes) / rate[energy.num_nodes] == pytest.approx(joules, rel=0.02)
        assert power.node_w / power.host_w == pytest.approx(0.012, abs=0.001)
