"""Forecasts of strategies, compared with a simulation of what machines do."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csdctl.perfmodel.prediction import StepTime
from csdctl.placement.equation1 import Placed
from csdctl.tuning import strategies
from csdctl.tuning.measurements import ForecastErrors
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT
from csdctl.tuning.search import Limits
from csdctl.tuning.strategies import MEASURED_BATCH, Shares, StrategyForecast, Training, choose_strategy
from csdctl.worker.protocol.model_info import CutInfo
from csdctl.worker.protocol.run_spec import SplitSpec

PARTS = SplitSpec.num_micro_batches
SHARES = Shares("block_4", forward=0.2, backward=0.3, head=0.5, cut_bytes=20_000, vector_bytes=1_000_000)
HOST, NODE = StepTime(0.0, 0.025), StepTime(0.0, 0.11)
PRIVATE = {f"csd{number}": 1000 for number in range(4)}


def training(host: StepTime = HOST, node: StepTime = NODE, byte_s: float = 1e-9, **work: Any) -> Training:
    """A training of private samples alone, unless `work` has others."""
    times = {"host": host, **dict.fromkeys(PRIVATE, node)}
    work = {"num_public": 0, "num_private": PRIVATE, "num_validation": 0, "epochs": 2} | work
    return Training(times, lambda num_bytes: 0.01 + num_bytes * 1e-9, byte_s, 20.0, 15.0, **work)


def forecast_whole(sizes: Mapping[str, int], fleet: Training) -> StrategyForecast:
    """The forecast of whole models with these batch sizes."""
    compute = {name: fleet.step_times[name].at(size) for name, size in sizes.items()}
    return fleet.forecast_data_parallel(sizes, compute, 0.02, vector_bytes=50_000)


def simulate_split(sizes: Mapping[str, int], shares: Shares, fleet: Training) -> float:
    """Return the seconds of a step: every message and every computation takes its turn.

    A node computes all forward passes, then backward passes as their gradients come. The host takes the
    nodes' micro-batches in turn, and its own first. One message at a time crosses the host's link.
    """
    nodes = [name for name in sizes if name != "host" and sizes[name]]
    part_s = {name: fleet.step_times[name].at(sizes[name]) / PARTS for name in nodes}
    sample_s = fleet.step_times["host"].at(MEASURED_BATCH) / MEASURED_BATCH
    transfer_s = {name: shares.cut_bytes * fleet.byte_s * sizes[name] / PARTS for name in nodes}
    link_free = 0.0
    host_free = fleet.step_times["host"].at(sizes.get("host", 0))
    node_free = {name: PARTS * part_s[name] * shares.forward for name in nodes}
    ends = []
    for number in range(PARTS):
        for name in nodes:
            computed = (number + 1) * part_s[name] * shares.forward
            arrived = max(computed, link_free) + transfer_s[name]
            done = max(arrived, host_free) + shares.head * sample_s * sizes[name] / PARTS
            returned = done + transfer_s[name]
            link_free, host_free = arrived + transfer_s[name], done
            node_free[name] = max(node_free[name], returned) + part_s[name] * shares.backward
            ends.append(node_free[name])
    return max([*ends, host_free]) + fleet.sum_s(shares.vector_bytes)


@given(
    size=st.integers(8, 64),
    forward=st.floats(0.05, 0.45),
    head_s=st.floats(0.001, 0.1),
    byte_s=st.sampled_from([1e-11, 1e-9, 1e-7, 1e-6]),
)
@settings(max_examples=200, deadline=None)
def test_split_step_takes_what_a_simulation_takes(
    size: int, forward: float, head_s: float, byte_s: float
) -> None:
    shares = replace(SHARES, forward=forward, backward=1.5 * forward, head=1 - 2.5 * min(0.38, forward))
    fleet = training(host=StepTime(0.0, head_s), byte_s=byte_s)
    sizes = {"host": 0, **dict.fromkeys(PRIVATE, size)}
    simulated = simulate_split(sizes, shares, fleet)
    assert fleet.split_step_s(sizes, shares) == pytest.approx(simulated, rel=0.06)


def test_epoch_goes_on_with_the_ranks_that_have_samples_left() -> None:
    placed = [Placed("host", 10, 0, 0, 20), Placed("csd0", 10, 50, 0, 0)]
    seconds = {"host": 3.0, "csd0": 1.0}
    assert (
        strategies.time_epoch(placed, lambda active: max(seconds[name] for name in active))
        == 2 * 3.0 + 3 * 1.0
    )


def test_ends_of_epochs_add_to_a_training_and_not_to_its_steps() -> None:
    sizes = {"host": 60, **dict.fromkeys(PRIVATE, 13)}
    quick, slow = (forecast_whole(sizes, training(epochs=5, save_s=save_s)) for save_s in (0.0, 2.0))
    assert slow.epoch_s == quick.epoch_s
    assert slow.first_run_s == pytest.approx(quick.first_run_s + 5 * 2.0)


def test_split_wins_where_all_samples_lie_on_slow_nodes() -> None:
    fleet = training()
    sizes = {"host": 0, **dict.fromkeys(PRIVATE, 16)}
    whole = forecast_whole(sizes, fleet)
    split = fleet.forecast_split(SHARES, Limits(max_global_batch=128))
    assert split is not None
    assert split.epoch_s < 0.7 * whole.epoch_s
    assert choose_strategy([whole, split]) is split
    assert split.batch_sizes["host"] == 0
    assert sum(split.batch_sizes.values()) <= 128


def test_split_gains_nothing_where_samples_are_spread_by_speed() -> None:
    """The machines have as much to compute in either way."""
    fleet = training(num_public=20_000, num_private={})
    sizes = {"host": 60, **dict.fromkeys(PRIVATE, 60 * 25 // 110)}
    whole = forecast_whole(sizes, fleet)
    split = fleet.forecast_split(SHARES, Limits(max_global_batch=sum(sizes.values())))
    assert split is not None
    assert choose_strategy([whole, split]) is whole


def test_features_pay_from_the_second_epoch_on() -> None:
    sizes = {"host": 60, **dict.fromkeys(PRIVATE, 13)}
    of_head = replace(SHARES, head=0.01, vector_bytes=50_000)

    def chosen(epochs: int) -> str:
        fleet = training(num_public=4000, epochs=epochs)
        whole = forecast_whole(sizes, fleet)
        features = fleet.forecast_features(whole, of_head, 0.9)
        assert features.next_run_s < features.first_run_s - fleet.process_s
        return choose_strategy([whole, features]).strategy

    assert chosen(1) == DATA_PARALLEL
    assert chosen(5) == FEATURES


def test_repeated_samples_have_their_features_computed_once() -> None:
    fleet = training(num_private={"csd0": 1000, "csd1": 10}, epochs=1, is_repeating=True)
    sizes = {"host": 0, "csd0": 16, "csd1": 16}
    whole = forecast_whole(sizes, fleet)
    features = fleet.forecast_features(whole, replace(SHARES, head=0.0), 1.0)
    extraction_s = features.first_run_s - features.next_run_s - fleet.process_s
    assert extraction_s == pytest.approx(1000 * NODE.at(MEASURED_BATCH) / MEASURED_BATCH)


def on_host(num_public: int, byte_s: float, host_s: float = 0.001) -> bool:
    """Return whether the host is to train a head, of a sum of 60 ms, alone."""
    work = {"num_public": num_public, "num_private": {}, "epochs": 10}
    fleet = training(host=StepTime(0.0, host_s), byte_s=byte_s, **work)
    fleet = replace(fleet, sum_s=lambda num_bytes: 0.06)
    sizes = {"host": 32, "csd0": 16, "csd1": 16}
    whole = forecast_whole(sizes, fleet)
    of_head = replace(SHARES, head=0.01)
    by_all = fleet.forecast_features(whole, of_head, 0.9)
    found = fleet.forecast_on_host(by_all, of_head, 5_000)
    assert found.first_run_s <= by_all.first_run_s
    assert found.trains_on_host == (found is not by_all)
    return found.trains_on_host


def test_host_trains_the_head_alone_where_sums_take_longer_than_sending_features() -> None:
    assert on_host(12_800, byte_s=1e-8)
    assert not on_host(64, byte_s=1e-8), "ten steps in all"
    assert not on_host(12_800, byte_s=1e-4), "a slow link"
    assert not on_host(12_800, byte_s=1e-8, host_s=1.0), "a slow host"


def test_split_within_limits_leaves_the_host_samples_of_its_own_when_some_are_public() -> None:
    fleet = training(host=StepTime(0.0, 0.005), num_public=2000, epochs=1)
    split = fleet.forecast_split(SHARES, Limits(max_global_batch=256))
    assert split is not None
    assert split.batch_sizes["host"] > 0
    exact = fleet.forecast_split(SHARES, Limits(global_batch=100))
    assert exact is not None
    assert sum(exact.batch_sizes.values()) == 100
    for limits in (Limits(global_batch=3), Limits(max_global_batch=2)):
        assert training().forecast_split(SHARES, limits) is None


def test_trial_corrects_a_forecast() -> None:
    fleet = training()
    sizes = {"host": 0, **dict.fromkeys(PRIVATE, 16)}
    split = fleet.forecast_split_of(sizes, SHARES)
    corrected = fleet.correct(split, 1.5)
    assert corrected.strategy == SPLIT
    assert math.isclose(corrected.epoch_s, 1.5 * split.epoch_s)
    assert math.isclose(corrected.first_run_s, 20.0 + 2 * corrected.epoch_s)


def test_range_of_a_first_run_is_wider_without_a_trial_and_after_runs_that_missed_their_forecast() -> None:
    sizes = {"host": 60, **dict.fromkeys(PRIVATE, 13)}
    fleet = training()
    whole = forecast_whole(sizes, fleet)

    features = fleet.forecast_features(whole, SHARES, 0.9)

    def width(found: StrategyForecast, errors: list[float], trial_error: float = 0.0) -> float:
        spread = ForecastErrors(tuple(errors)).after_trial(trial_error)
        low, high = strategies.add_range(found, spread).first_run_s_range or (0.0, 0.0)
        assert low * high == pytest.approx(found.first_run_s**2)
        return high / low

    tried = width(whole, [])
    assert 1.2 < tried < width(features, [])
    assert tried < width(whole, [], 0.1)
    for found in (whole, features):
        assert 1.2 < width(found, [0.01] * 8) < width(found, []) < width(found, [0.3] * 8)


def cut(layer: str, num_operations: int, num_bytes: int = 1000) -> CutInfo:
    return CutInfo(layer, num_bytes, num_operations, 50)


def test_cuts_with_about_the_same_work_before_them_are_timed_once_and_their_shares_add_up() -> None:
    cuts = [cut("best", 500), cut("next to it", 510), cut("earlier", 300), cut("last", 980)]
    assert [one.layer for one in strategies.spread_cuts(cuts, 1000)] == ["best", "earlier", "last"]
    shares = strategies.share_by_flops(cut("middle", 400), 1000)
    assert shares is not None
    assert shares.prefix + shares.head == pytest.approx(1)
    assert (shares.prefix, shares.vector_bytes) == (pytest.approx(0.4), 200)
