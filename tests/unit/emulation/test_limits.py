import pytest

from csdctl.emulation.limits import parse_own_group, plan_quota


@pytest.mark.parametrize(
    ("own_cgroups", "version", "group"),
    [
        ("4:memory:/jobs/7\n2:cpuacct:/\n1:cpu:/jobs/7\n0::/\n", 1, "jobs/7"),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", 2, "user.slice/user-1000.slice/session-2.scope"),
        ("0::/\n", 2, ""),
    ],
)
def test_own_group_is_found(own_cgroups: str, version: int, group: str) -> None:
    assert parse_own_group(own_cgroups, version) == group


@pytest.mark.parametrize("cpu", [0.01, 0.05, 0.25, 1.0, 3.5])
def test_the_quota_gives_the_share_and_the_kernel_accepts_it(cpu: float) -> None:
    quota_us, period_us = plan_quota(cpu)
    assert quota_us / period_us == pytest.approx(cpu, rel=0.01)
    assert quota_us >= 1000
    assert 1000 <= period_us <= 1_000_000
