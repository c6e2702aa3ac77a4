from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.job.model import Job, load_job
from csdctl.perfmodel.published import TABLE_1, Network
from csdctl.runs.directory import ProjectDirectory
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from csdctl.tuning.scaling_curve import Power
from csdctl.workflows.forecast.basis import ForecastBasis, published_basis, tuned_basis
from csdctl.workflows.forecast.forecast import (
    MAX_NODES,
    ForecastRequest,
    forecast,
    given_power,
    parse_node_counts,
)

RANKS = [
    RankPlan(node="host", batch_size=100, threads=2, step_time_s=1.0, samples_per_s=100.0),
    RankPlan(node="csd0", batch_size=10, threads=1, step_time_s=1.0, samples_per_s=10.0),
    RankPlan(node="dpu0", batch_size=30, threads=1, step_time_s=1.0, samples_per_s=30.0),
]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "job.yaml").write_text(
        "model: keras.applications:MobileNetV2\n"
        "data: {public: {path: data}}\n"
        "recipe: {epochs: 3, learning_rate: 0.1}\n"
    )
    (tmp_path / "data").mkdir()
    return load_job(tmp_path / "job.yaml")


@pytest.fixture
def project(tmp_path: Path) -> ProjectDirectory:
    return ProjectDirectory(tmp_path)


def tuned(project: ProjectDirectory, job: Job, **changes: object) -> None:
    plan = Plan(job="job", job_fingerprint=job.fingerprint(), method="stannis", num_probes=9, ranks=RANKS)
    save_plan(project.plan(job.name), plan.model_copy(update=changes))


def plan_basis(project: ProjectDirectory, job: Job) -> ForecastBasis:
    """A plan, without fleet and measurements."""
    return tuned_basis(job, project, None, lambda line: None)


class TestFromAPlan:
    def test_curve_covers_the_nodes_of_the_plan_by_default(self, project: ProjectDirectory, job: Job) -> None:
        tuned(project, job)
        answer = forecast(plan_basis(project, job), ForecastRequest())
        assert [point.samples_per_s for point in answer.points] == pytest.approx([100, 110, 140])
        assert answer.basis.source == "measured"

    def test_sum_that_was_never_measured_is_marked(self, project: ProjectDirectory, job: Job) -> None:
        tuned(project, job)
        basis = plan_basis(project, job)
        assert "counted as 0 s" in basis.origins["sum"]
        slowed = forecast(basis, ForecastRequest(node_sum_s=0.1))
        assert slowed.points[2].sum_s == pytest.approx(0.2)
        assert slowed.basis.origins["sum"].startswith("assumption: 0.1 s for each node")

    def test_epochs_are_the_jobs_and_samples_have_to_be_given(
        self, project: ProjectDirectory, job: Job
    ) -> None:
        tuned(project, job)
        basis = plan_basis(project, job)
        assert forecast(basis, ForecastRequest()).num_samples is None
        assert forecast(basis, ForecastRequest(num_samples=1000)).num_samples == 3000
        assert forecast(basis, ForecastRequest(num_samples=1000, epochs=2)).num_samples == 2000

    def test_edited_batch_size_keeps_the_measured_speed(self, project: ProjectDirectory, job: Job) -> None:
        edited = RANKS[1].model_copy(update={"batch_size": 20})
        tuned(project, job, ranks=[RANKS[0], edited])
        [node] = plan_basis(project, job).nodes
        assert (node.step_s, node.samples_per_s) == (2.0, 10.0)

    def test_plan_without_measurements_is_rejected(self, project: ProjectDirectory, job: Job) -> None:
        tuned(project, job, ranks=[RankPlan(node="host", batch_size=8, threads=1)])
        with pytest.raises(InputError, match="no step time for host"):
            plan_basis(project, job)

    def test_plan_of_the_host_alone_cannot_forecast_nodes(self, project: ProjectDirectory, job: Job) -> None:
        tuned(project, job, ranks=RANKS[:1])
        basis = plan_basis(project, job)
        assert forecast(basis, ForecastRequest()).verdict is None
        with pytest.raises(InputError, match="the gain from nodes is unknown"):
            forecast(basis, ForecastRequest(node_counts=[1]))


class TestPublished:
    @pytest.mark.parametrize("network", Network)
    def test_host_alone_reaches_the_rate_of_table_1(self, network: Network) -> None:
        alone = forecast(published_basis(network), ForecastRequest()).points[0]
        assert alone.samples_per_s == pytest.approx(TABLE_1[network].host_samples_per_s)

    @pytest.mark.parametrize("network", Network)
    def test_every_figure_has_an_origin(self, network: Network) -> None:
        basis = published_basis(network)
        assert basis.source == "published"
        assert set(basis.origins) == {"speeds", "sum", "power"}
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
        [
            ("24", [24]),
            ("0..3", [0, 1, 2, 3]),
            ("8,4", [4, 8]),
            (" 1 .. 2", None),
            ("1..3,3,5", [1, 2, 3, 5]),
        ],
    )
    def test_numbers_of_nodes_are_parsed(self, written: str, counts: list[int] | None) -> None:
        if counts is None:
            with pytest.raises(InputError):
                parse_node_counts(written)
        else:
            assert parse_node_counts(written) == counts

    @pytest.mark.parametrize(
        "written", ["", "x", "-1", "3..1", "1...3", "1,,2", "1.5", f"{MAX_NODES + 1}", "9" * 5000, "٣"]
    )
    def test_malformed_numbers_of_nodes_are_rejected(self, written: str) -> None:
        with pytest.raises(InputError, match="invalid --nodes") as raised:
            parse_node_counts(written)
        assert "1..36" in raised.value.remedy

    def test_power_needs_host_and_node(self) -> None:
        assert given_power(None, None, None) is None
        assert given_power(300, 10, 250) == Power(300, 10, 250)
        for powers in ((300, None, None), (None, 10, None), (None, None, 250)):
            with pytest.raises(InputError, match="needs the power"):
                given_power(*powers)

    @pytest.mark.parametrize("powers", [(0.0, 1.0), (-1.0, 1.0), (300.0, -1.0), (float("nan"), 1.0)])
    def test_impossible_power_is_rejected(self, powers: tuple[float, float]) -> None:
        with pytest.raises(InputError, match="invalid power"):
            given_power(*powers, None)
