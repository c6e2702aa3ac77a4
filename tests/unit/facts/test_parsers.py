import pytest

from csdctl.facts.machine import (
    parse_cpuinfo,
    parse_disk_free,
    parse_glibc,
    parse_limits,
    parse_meminfo,
    parse_python,
)


def test_big_and_little_cores_are_both_named() -> None:
    cores = "".join(f"processor : {number}\nCPU part : 0xd03\n\n" for number in range(4))
    assert parse_cpuinfo(cores)["cpu_model"] == "0xd03"
    facts = parse_cpuinfo(f"{cores}Model name: Cortex-A53\nModel: 4\nModel name: Cortex-A73\n")
    assert (facts["cpu_model"], facts["num_cores"]) == ("Cortex-A53 + Cortex-A73", 4)


@pytest.mark.parametrize(
    ("lines", "cpu_limit", "memory_limit"),
    [
        ("cpus_allowed", None, None),
        ("cpu.max max 100000\nmemory.max max", None, None),
        ("cpu.max 22000 100000\nmemory.max 1073741824", 0.22, 1 << 30),
        ("cpu.cfs_quota_us 200000\ncpu.cfs_period_us 100000", 2.0, None),
        ("cpu.cfs_quota_us -1\ncpu.cfs_period_us 100000", None, None),
        ("memory.limit_in_bytes 9223372036854771712", None, None),
        ("cpus_allowed 0-1,4", 3.0, None),
        ("cpu_environment 0.5\ncpu.max 200000 100000", 0.5, None),
        ("cpu_environment 3\ncpu.max 200000 100000\nmemory_environment 9\nmemory.max 10", 2.0, 9),
        ("cpu_environment \nmemory_environment ", None, None),
    ],
)
def test_tightest_limit_wins(lines: str, cpu_limit: float | None, memory_limit: int | None) -> None:
    assert parse_limits(lines) == {"cpu_limit": cpu_limit, "memory_limit_bytes": memory_limit}


@pytest.mark.parametrize("value", ["0", "nan", "two"])
def test_invalid_limit_in_the_environment_is_reported(value: str) -> None:
    with pytest.raises(ValueError, match="CSDCTL_CPU_LIMIT"):
        parse_limits(f"cpu_environment {value}")


def test_disk_with_a_space_in_its_mount_point_is_read() -> None:
    text = (
        "Filesystem 1024-blocks Used Available Capacity Mounted\n//nas/my share 100 60 40 60% /mnt/my disk\n"
    )
    assert parse_disk_free(text) == {"disk_free_bytes": 40960}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("glibc 2.36\n", "2.36"),
        ("ldd (Debian GLIBC 2.28-10+deb10u3) 2.28\nCopyright (C) 2018\n", "2.28"),
        ("ldd (GNU libc) 2.34\n", "2.34"),
    ],
)
def test_glibc_is_read_from_getconf_and_from_ldd(text: str, version: str) -> None:
    assert parse_glibc(text) == {"glibc_version": version}


@pytest.mark.parametrize("text", ["", "nonsense here\n", "{}", "[1]", "sh: 1: not found\n"])
def test_invalid_output_is_a_value_error(text: str) -> None:
    for parse in (parse_cpuinfo, parse_meminfo, parse_disk_free, parse_python, parse_glibc):
        with pytest.raises(ValueError, match="."):
            parse(text)
