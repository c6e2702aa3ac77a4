import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.perfmodel.energy import Power, fit_power

COUNTS = (0, 4, 8, 16, 24)
RATES = (31.0, 40.0, 50.0, 70.0, 90.0)


def energies(power: Power) -> list[float]:
    return [power.at(count) / rate for count, rate in zip(COUNTS, RATES, strict=True)]


def test_power_is_the_hosts_plus_the_nodes() -> None:
    assert Power(300.0, 10.0).at(4) == 340.0
    assert Power(300.0, 10.0).at(0) == 300.0


def test_host_alone_may_be_another_machine() -> None:
    power = Power(300.0, 10.0, without_nodes_w=200.0)
    assert power.at(0) == 200.0
    assert power.at(1) == 310.0


@pytest.mark.parametrize("powers", [(-1.0, 1.0), (1.0, -1.0), (1.0, 1.0, -1.0)])
def test_negative_power_is_refused(powers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Power(*powers)


@given(st.floats(1, 1e4), st.floats(0, 1e3))
def test_pair_behind_the_energies_is_recovered(host_w: float, node_w: float) -> None:
    fitted = fit_power(COUNTS, energies(Power(host_w, node_w)), RATES)
    assert fitted.host_w == pytest.approx(host_w, rel=1e-6)
    assert fitted.node_w == pytest.approx(node_w, rel=1e-6, abs=1e-6 * host_w)


def test_no_other_pair_has_smaller_squares() -> None:
    measured = [
        energy * wrong
        for energy, wrong in zip(energies(Power(300, 10)), (1.1, 0.9, 1, 1.05, 0.97), strict=True)
    ]

    def squares(power: Power) -> float:
        pairs = zip(energies(power), measured, strict=True)
        return sum((computed / energy - 1) ** 2 for computed, energy in pairs)

    fitted = fit_power(COUNTS, measured, RATES)
    for host_w, node_w in ((1, 0), (-1, 0), (0, 0.1), (0, -0.1)):
        assert squares(Power(fitted.host_w + host_w, fitted.node_w + node_w)) > squares(fitted)


def test_negative_node_power_becomes_zero_and_the_host_is_fitted_again() -> None:
    rates = (10.0, 20.0)
    fitted = fit_power((0, 10), (10.0, 4.0), rates)  # 100 W, and 80 W
    assert fitted.node_w == 0
    assert 80 < fitted.host_w < 100


def test_one_number_of_nodes_does_not_determine_two_powers() -> None:
    with pytest.raises(ValueError, match="two different numbers"):
        fit_power((4, 4), (1.0, 1.1), (10.0, 10.0))
