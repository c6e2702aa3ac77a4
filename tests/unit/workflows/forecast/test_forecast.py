"""What `csdctl forecast` is computed from: measurements, with a plan or without."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from csdctl.cli.app import app
from csdctl.errors import InputError
from csdctl.fleet.facts import save_facts
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import HOST_NAME, Node
from csdctl.tuning.plan import Plan, Predicted, RankPlan, StrategyPlan, save_plan
from csdctl.tuning.scaling_curve import Power
from csdctl.workflows.forecast import forecast as forecasting
from csdctl.workflows.forecast.forecast import ForecastRequest, forecast, given_power, parse_node_counts
from csdctl.workflows.train.plan import build_fingerprint
from tests.unit.perfmodel import published
from tests.unit.workflows import measured_project
from tests.unit.workflows.measured_project import OVERHEAD_FACTOR, SUMS, MeasuredProject, facts_of


def test_range_for_an_emulated_fleet_is_of_the_measured_number_of_nodes_alone() -> None:
    """Other numbers of nodes leave the host other cores."""
    basis = published.basis_of(published.Network.MOBILENETV2, 3)
    emulated = replace(basis, source="emulated")
    assert emulated.range_of(3, 1000.0) == basis.range_of(2, 1000.0) == basis.spread.range_of(1000.0)
    assert emulated.range_of(2, 1000.0) is None


def test_request_replaces_samples_epochs_and_power() -> None:
    request = ForecastRequest([24], epochs=10, num_samples=1_000_000, power=Power(500.0, 12.0))
    answer = forecast(published.basis_of(published.Network.MOBILENETV2), request)
    assert answer.num_samples == 10_000_000
    assert answer.points[0].power_w == 500 + 24 * 12
    assert answer.basis.origins["power"].startswith("assumption")


class TestParsing:
    @pytest.mark.parametrize(
        ("written", "counts"),
        [("24", [24]), ("0..3", [0, 1, 2, 3]), ("8,4", [4, 8]), ("1..3,3,5", [1, 2, 3, 5])],
    )
    def test_numbers_of_nodes_are_parsed(self, written: str, counts: list[int]) -> None:
        assert parse_node_counts(written) == counts

    @pytest.mark.parametrize(
        "written",
        [
            "",
            "x",
            "-1",
            "3..1",
            " 1 .. 2",
            "1...3",
            "1,,2",
            "1.5",
            f"{forecasting.MAX_NODES + 1}",
            "9" * 5000,
            "٣",
        ],
    )
    def test_malformed_numbers_of_nodes_are_rejected(self, written: str) -> None:
        with pytest.raises(InputError, match="invalid .*nodes") as raised:
            parse_node_counts(written)
        assert "1..36" in raised.value.remedy

    def test_power_needs_host_and_node(self) -> None:
        assert given_power(None, None) is None
        assert given_power(300, 10) == Power(300, 10)
        for powers in ((300, None), (None, 10)):
            with pytest.raises(InputError, match="requires .*_watts"):
                given_power(*powers)
        for powers in ((0.0, 1.0), (-1.0, 1.0), (300.0, -1.0), (float("nan"), 1.0)):
            with pytest.raises(InputError, match="invalid power"):
                given_power(*powers)


def basis_of(at: MeasuredProject) -> forecasting.ForecastBasis:
    def say(line: str) -> None:
        pytest.fail(f"nothing should be built, but: {line}")

    return forecasting.tuned_basis(at.job, at.project, at.fleet, ForecastRequest(), say)


def ask(at: MeasuredProject, **request: Any) -> forecasting.Forecast:
    return forecast(basis_of(at), ForecastRequest(**request))


def plan_of(at: MeasuredProject, sizes: tuple[int, ...] = (100, 10, 12), **changes: Any) -> Plan:
    """A plan as `tune` writes it: with other batch sizes than the best ones, to distinguish them."""
    names = [HOST_NAME, *(node.name for node in at.fleet.nodes)]
    step_s = measured_project.trial_step_s(sizes, at.features.vector_bytes)
    plan = Plan(
        job=at.job.name,
        job_fingerprint=at.job.fingerprint(),
        method="fit",
        method_arguments={"max_global_batch": 500},
        predicted=Predicted(
            global_batch=sum(sizes),
            batch_sizes=list(sizes),
            step_s=step_s,
            samples_per_s=sum(sizes) / step_s,
            compute_share=0.8,
            imbalance_share=0.1,
            communication_share=0.1,
            is_confirmed=True,
        ),
        ranks=[
            RankPlan(node=name, batch_size=size, threads=4) for name, size in zip(names, sizes, strict=False)
        ],
    )
    facts = {name: facts_of(name) for name in names}
    plan = plan.model_copy(update={"made_for": build_fingerprint(plan, at.job, facts), **changes})
    save_plan(at.project.plan(at.job.name), plan)
    return plan


class TestFromMeasurementsAlone:
    def test_more_nodes_than_were_tuned_get_the_best_batch_sizes_for_their_number(
        self, measured: MeasuredProject
    ) -> None:
        answer = ask(measured, node_counts=[1, 2, 24])
        rates = [point.samples_per_s for point in answer.points]
        assert rates == sorted(rates)
        assert all(point.global_batch <= 4 * measured.job.recipe.reference_batch for point in answer.points)
        # Every step follows from the fits, the sums and the trial, for some batch sizes.
        assert answer.points[2].sum_s == pytest.approx(SUMS.at(measured.features.vector_bytes, 25))
        assert answer.points[2].efficiency < answer.points[1].efficiency
        assert answer.basis.fleet.overhead_factor == pytest.approx(OVERHEAD_FACTOR)
        assert answer.basis.source == "measured"

    def test_no_node_with_private_data_is_left_out(self, tmp_path: Path) -> None:
        private = measured_project.make_project(tmp_path, is_private=True)
        measured_project.remember_probes(private)
        measured_project.remember_sums(private)
        answer = ask(private, node_counts=[2, 12])
        assert [point.num_left_out for point in answer.points] == [0, 0]
        assert answer.num_samples == 3 * 180_000
        assert answer.basis.origins["samples"].startswith("60,000 public and 120,000 private on 2 nodes")


class TestFromPlanAndMeasurements:
    def test_fleet_as_planned_has_the_plans_batch_sizes_and_the_rate_of_its_trial(
        self, measured: MeasuredProject
    ) -> None:
        plan = plan_of(measured)
        alone, pair, planned, more = ask(measured, node_counts=[0, 1, 2, 3]).points
        assert planned.global_batch == 122
        assert plan.predicted
        assert planned.samples_per_s == pytest.approx(plan.predicted.samples_per_s)
        assert planned.step_s == pytest.approx(plan.predicted.step_s)
        assert max(alone.global_batch, pair.global_batch, more.global_batch) <= 500
        assert more.global_batch > 122
        assert more.samples_per_s > planned.samples_per_s

    def test_node_that_the_plan_leaves_out_stays_idle(self, measured: MeasuredProject) -> None:
        plan = plan_of(measured)
        save_plan(
            measured.project.plan("job"),
            plan.model_copy(update={"ranks": plan.ranks[:2], "left_out": ["csd1"], "predicted": None}),
        )
        point = ask(measured).points[2]
        assert (point.global_batch, point.num_left_out) == (110, 1)
        assert point.sum_s == pytest.approx(SUMS.at(measured.features.vector_bytes, 2))

    def test_plan_of_a_changed_job_or_for_other_nodes_is_not_used_and_the_reason_is_given(
        self, measured: MeasuredProject
    ) -> None:
        plan_of(measured, job_fingerprint="other")
        answer = ask(measured)
        assert answer.points[2].global_batch > 122
        assert answer.basis.origins["plan"].startswith("not used: the plan does not match")
        plan_of(measured)
        nodes = (*measured.fleet.nodes, Node("csd2", "10.1.1.9"))
        larger = replace(measured, fleet=replace(measured.fleet, nodes=nodes))
        save_facts(larger.fleet, {name: facts_of(name) for name in ("host", "csd0", "csd1", "csd2")})
        basis = basis_of(larger)
        assert len(basis.fleet.nodes) == 3
        assert basis.origins["plan"] == "not used: the plan is for other nodes: csd0, csd1"


class TestWithoutAnything:
    def test_error_without_measurements_has_a_remedy(self, at: MeasuredProject) -> None:
        with pytest.raises(InputError, match="there are no measurements yet") as raised:
            basis_of(at)
        assert "csdctl tune" in raised.value.remedy
        assert not at.project.measurements.exists()

    def test_machines_without_facts_are_named(self, measured: MeasuredProject) -> None:
        save_facts(measured.fleet, {"host": facts_of("host"), "csd0": facts_of("csd0")})
        with pytest.raises(InputError, match="the facts of csd1 are unknown") as raised:
            basis_of(measured)
        assert "csdctl discover" in raised.value.remedy


def test_command_for_24_nodes_after_tuning_two(
    measured: MeasuredProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(measured.project.root)
    command = ["forecast", "--nodes", "24", "--json", "--max-global-batch"]
    small, large = (json.loads(CliRunner().invoke(app, [*command, most]).stdout) for most in ("512", "4096"))
    [few], [point] = small["curve"], large["curve"]
    assert large["source"] == "measured"
    assert (point["num_nodes"], point["num_left_out"], point["is_host_training"]) == (24, 0, True)
    assert "more nodes than 2" in large["origins"]["reach"]
    assert few["global_batch"] <= 512 < point["global_batch"] <= 4096
    assert few["samples_per_s"] < point["samples_per_s"]


def test_constant_power_of_the_fleet_file_is_used_unless_the_request_has_another(
    measured: MeasuredProject,
) -> None:
    text = measured.fleet.path.read_text().replace("{", "{power: 10 W, ")
    measured.fleet.path.write_text(f"host: {{power: 90 W}}\n{text}")
    fleet, path = load_fleet(measured.fleet.path), measured.project.root
    for given, expected in ((None, 110), (Power(500, 12), 524)):
        request = ForecastRequest([2], power=given)
        answer = forecasting.forecast_job(measured.job.path, fleet, path, request, print)
        assert answer.points[0].power_w == expected


class TestOtherStrategies:
    def test_forecast_says_that_training_follows_another_strategy(self, measured: MeasuredProject) -> None:
        strategies = [StrategyPlan(strategy="features", cut="pool", first_run_s_range=(80.0, 99.0))]
        plan_of(measured, strategy="features", strategies=strategies)
        basis = basis_of(measured)
        assert (
            "the plan's strategy, features, which by the plan takes 80.0 s to 99.0 s in all"
            in basis.origins["strategy"]
        )
        assert "plan" not in basis.origins

    def test_batch_sizes_of_a_split_are_not_those_of_a_forecast(self, measured: MeasuredProject) -> None:
        without = forecast(basis_of(measured), ForecastRequest())
        plan_of(measured, (1, 10, 12), strategy="split", cut="block_3")
        basis = basis_of(measured)
        assert "the plan's strategy, split" in basis.origins["strategy"]
        assert basis.origins["plan"] == "not used: its batch sizes are those of a model that is split"
        assert forecast(basis, ForecastRequest()).points == without.points
