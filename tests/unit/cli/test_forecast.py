"""`csdctl forecast`: the table, the JSON document, and the command."""

import dataclasses
import json
import re
from io import StringIO
from typing import Any

import pytest

from csdctl.perfmodel.prediction import CollectiveCost
from csdctl.terminal.streams import Streams
from csdctl.terminal.tune import show_forecast
from csdctl.tuning.scaling_curve import Power
from csdctl.workflows.forecast.forecast import ForecastRequest, forecast
from tests.unit.perfmodel.published import Network, basis_of


def shown(network: Network, num_nodes: int, request: ForecastRequest, **changes: Any) -> str:
    streams, basis = Streams(stdout=StringIO()), dataclasses.replace(basis_of(network, num_nodes), **changes)
    show_forecast(streams, forecast(basis, request))
    return streams.stdout.getvalue()  # type: ignore[attr-defined]


def document(network: Network, num_nodes: int, request: ForecastRequest) -> Any:
    streams = Streams(stdout=StringIO(), is_json=True)
    show_forecast(streams, forecast(basis_of(network, num_nodes), request))
    return json.loads(streams.stdout.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("network", "num_nodes", "request_", "sentences"),
    [
        (
            Network.MOBILENETV2,
            24,
            ForecastRequest([24]),
            ["24 nodes: worth it", "worth it from 1 node", "measured figures"],
        ),
        (
            Network.INCEPTIONV3,
            4,
            ForecastRequest([0, 4]),
            [
                "4 nodes: NOT worth it",
                "no faster than the host alone: 0.86 ×",
                "fewer nodes are not worth it",
            ],
        ),
        (
            Network.MOBILENETV2,
            24,
            ForecastRequest([24], power=Power(300, 40)),
            ["NOT worth it", "no less than on the host alone", "lowest energy per sample with 0 nodes"],
        ),
    ],
)
def test_verdict_and_its_reasons(
    network: Network, num_nodes: int, request_: ForecastRequest, sentences: list[str]
) -> None:
    text = shown(network, num_nodes, request_)
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_nodes_whose_sums_take_what_they_add_are_told() -> None:
    fleet = basis_of(Network.MOBILENETV2, 24).fleet
    dear = dataclasses.replace(fleet, sum_cost=CollectiveCost(per_rank_s=0.5))
    assert "node adds less than 10%" in shown(Network.MOBILENETV2, 24, ForecastRequest([100]), fleet=dear)


def test_ranges_and_energy_fit_into_80_columns() -> None:
    text = shown(Network.MOBILENETV2, 24, ForecastRequest([24], epochs=99))
    assert re.search(r"\n +24 .* to .*:.* J .* MJ", text)


def test_hundred_numbers_of_nodes_are_thinned_out() -> None:
    request = ForecastRequest(range(1, 101))
    text = shown(Network.SQUEEZENET, 24, request)
    assert len(text.splitlines()) < 80
    assert "\n     0 " in text
    assert "\n   100 " in text
    assert len(document(Network.SQUEEZENET, 24, request)["curve"]) == 61


def test_document_has_curve_verdict_and_origins() -> None:
    written = document(Network.NASNET, 4, ForecastRequest([0, 4], epochs=2))
    assert written["schema"] == "csdctl.forecast/1"
    assert written["source"] == "measured"
    assert (written["epochs"], written["num_samples"]) == (2, 168_000)
    alone, four = written["curve"]
    assert alone["samples_per_s"] == pytest.approx(47.31)
    assert four["time_s"] == pytest.approx(168_000 / four["samples_per_s"])
    assert four["energy_joules"] == pytest.approx(168_000 * four["joules_per_image"])
    assert written["verdict"]["is_worth_it"] is False
    assert [reason["code"] for reason in written["verdict"]["reasons"]] == ["little_gain"]
