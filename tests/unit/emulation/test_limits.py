from pathlib import Path

import pytest

from csdctl.emulation.limits import CpuHierarchy, parse_hierarchies, plan_quota

# Captured from a machine with version 1 (and an empty version 2 beside it).
MOUNTS_V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
OWN_V1 = "4:memory:/jobs/7\n2:cpuacct:/\n1:cpu:/jobs/7\n0::/\n"

MOUNTS_V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OWN_V2 = "0::/user.slice/user-1000.slice/session-2.scope\n"


def test_the_cpu_controller_of_version_1_is_found_and_comes_first() -> None:
    assert parse_hierarchies(MOUNTS_V1, OWN_V1) == [
        CpuHierarchy(1, Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu/jobs/7")),
        CpuHierarchy(2, Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/unified")),
    ]


def test_the_own_group_of_version_2_is_found() -> None:
    own = Path("/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope")
    assert parse_hierarchies(MOUNTS_V2, OWN_V2) == [CpuHierarchy(2, Path("/sys/fs/cgroup"), own)]


def test_in_a_container_the_mount_is_the_own_group() -> None:
    mounts = MOUNTS_V1.replace("0:29 / /sys", "0:29 /docker/abc /sys")
    own = OWN_V1.replace("1:cpu:/jobs/7", "1:cpu:/docker/abc")
    assert parse_hierarchies(mounts, own)[0].own == Path("/sys/fs/cgroup/cpu")


@pytest.mark.parametrize("cpu", [0.01, 0.05, 0.25, 1.0, 3.5])
def test_the_quota_gives_the_share_and_the_kernel_accepts_it(cpu: float) -> None:
    quota_us, period_us = plan_quota(cpu)
    assert quota_us / period_us == pytest.approx(cpu, rel=0.01)
    assert quota_us >= 1000
    assert 1000 <= period_us <= 1_000_000
