import pytest

from csdctl.errors import InputError
from csdctl.perfmodel.published import Network
from csdctl.tuning.scaling_curve import Power
from csdctl.workflows.forecast.forecast import (
    MAX_NODES,
    ForecastRequest,
    forecast,
    given_power,
    parse_node_counts,
    published_basis,
)


class TestPublished:
    @pytest.mark.parametrize("network", Network)
    def test_every_figure_has_an_origin(self, network: Network) -> None:
        basis = published_basis(network)
        assert basis.source == "published"
        assert set(basis.origins) == {"speeds", "sum", "range", "power"}
        assert ("assumption" in basis.origins["sum"]) == (network is not Network.MOBILENETV2)

    def test_large_network_on_few_csds_is_not_worth_it(self) -> None:
        verdict = forecast(published_basis(Network.INCEPTIONV3), ForecastRequest(node_counts=[4])).verdict
        assert verdict
        assert not verdict.is_worth_it

    def test_request_replaces_samples_epochs_and_power(self) -> None:
        request = ForecastRequest([24], epochs=10, num_samples=1_000_000, power=Power(500.0, 12.0))
        answer = forecast(published_basis(Network.MOBILENETV2), request)
        assert answer.num_samples == 10_000_000
        assert answer.points[0].power_w == 500 + 24 * 12
        assert answer.basis.origins["power"].startswith("assumption")

    def test_sum_time_that_is_not_a_number_is_rejected(self) -> None:
        with pytest.raises(InputError, match="invalid --sum-seconds"):
            ForecastRequest(node_sum_s=float("nan"))


class TestParsing:
    @pytest.mark.parametrize(
        ("written", "counts"),
        [("24", [24]), ("0..3", [0, 1, 2, 3]), ("8,4", [4, 8]), ("1..3,3,5", [1, 2, 3, 5])],
    )
    def test_numbers_of_nodes_are_parsed(self, written: str, counts: list[int]) -> None:
        assert parse_node_counts(written) == counts

    @pytest.mark.parametrize(
        "written",
        ["", "x", "-1", "3..1", " 1 .. 2", "1...3", "1,,2", "1.5", f"{MAX_NODES + 1}", "9" * 5000, "٣"],
    )
    def test_malformed_numbers_of_nodes_are_rejected(self, written: str) -> None:
        with pytest.raises(InputError, match="invalid --nodes") as raised:
            parse_node_counts(written)
        assert "1..36" in raised.value.remedy

    def test_power_needs_host_and_node(self) -> None:
        assert given_power(None, None, None) is None
        assert given_power(300, 10, 250) == Power(300, 10, 250)
        for powers in ((300, None, None), (None, 10, None), (None, None, 250)):
            with pytest.raises(InputError, match="requires --"):
                given_power(*powers)

    @pytest.mark.parametrize("powers", [(0.0, 1.0), (-1.0, 1.0), (300.0, -1.0), (float("nan"), 1.0)])
    def test_impossible_power_is_rejected(self, powers: tuple[float, float]) -> None:
        with pytest.raises(InputError, match="invalid power"):
            given_power(*powers, None)
