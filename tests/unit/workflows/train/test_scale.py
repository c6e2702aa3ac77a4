"""The plans of a scaling series."""

from types import SimpleNamespace

import pytest

from csdctl.errors import InputError
from csdctl.reporting.tables import STRONG, WEAK
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from csdctl.workflows.train.scale import choose_counts, plan_point, plan_points


def plan(*sizes, most=None):
    names = ["host", *(f"csd{number}" for number in range(len(sizes) - 1))]
    ranks = [
        RankPlan(node=name, batch_size=size, threads=1, max_batch_size=most)
        for name, size in zip(names, sizes, strict=True)
    ]
    return Plan(job="job", job_fingerprint="f", method="fit", ranks=ranks)


@pytest.mark.parametrize(
    ("most", "counts"),
    [(0, (0,)), (1, (0, 1)), (4, (0, 1, 2, 4)), (6, (0, 1, 2, 4, 6)), (36, (0, 1, 2, 4, 8, 16, 32, 36))],
)
def test_series_doubles_and_ends_with_all_nodes(most, counts):
    assert choose_counts(most, with_0=True) == counts
    assert choose_counts(most, with_0=False) == counts[1:]


@pytest.mark.parametrize(("host", "counts"), [(10, [0, 1, 2]), (0, [1, 2])])
def test_series_of_a_host_that_does_not_train_begins_with_one_node(tmp_path, host, counts):
    save_plan(tmp_path / "plan.yaml", plan(host, 12, 10))
    fleet = SimpleNamespace(machines={"host": None, "csd0": None, "csd1": None})
    request = SimpleNamespace(
        batch_size=None, directory=tmp_path, plan_path=tmp_path / "plan.yaml", fleet=fleet
    )
    assert [point.num_nodes for point in plan_points(request, [WEAK], ())] == counts


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (WEAK, [[100], [100, 12], [100, 12, 10]]),  # ranks keep their batch sizes
        (STRONG, [[122], [109, 13], [100, 12, 10]]),  # the global batch stays, in proportion
    ],
)
def test_batch_sizes_of_a_series(kind, expected):
    assert [plan_point(plan(100, 12, 10), kind, count, 2).batch_sizes for count in (0, 1, 2)] == expected


@pytest.mark.parametrize(
    ("of", "kind", "count", "said"),
    [
        (plan(0, 12), WEAK, 0, "no run with 0 nodes"),
        (plan(100, 12), WEAK, 2, "the plan has 1"),
        (plan(100, 12, most=110), STRONG, 0, "at most 110 fit in its memory"),
    ],
)
def test_point_that_cannot_be_trained_is_refused(of, kind, count, said):
    with pytest.raises(InputError, match=said):
        plan_point(of, kind, count, 1)
