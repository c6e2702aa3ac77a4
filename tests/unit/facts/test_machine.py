"""The parsers on captured output. captures/README.md says which captures are real."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from csdctl.errors import RemoteCommandError
from csdctl.facts.machine import (
    CONDITION_FACTS,
    MACHINE_FACTS,
    NVME_SCRIPT,
    ClockTrip,
    build_command,
    collect,
    collect_facts,
    parse_cpuinfo,
    parse_disk_free,
    parse_facts,
    parse_glibc,
    parse_gpu,
    parse_limits,
    parse_nvme,
    parse_places,
)
from csdctl.fleet.facts import Condition, DirectorySpace, Drive, Facts
from csdctl.transport.local import LocalSession
from tests.patience import scaled

CAPTURES = Path(__file__).parent / "captures"
TRIPS = [ClockTrip(1000.0, 0.5, "1000.900000000\n"), ClockTrip(1000.0, 0.2, "1000.600000000\n")]


# df of GNU coreutils, as the script prints it; the second place is a full tmpfs.
PLACES = """\
place /root
space /dev/vda         264212084 24881724  81509188      24% /
inodes /dev/vda       16777216 447426 16329790    3% /
place /tmp
refused sh: 4: printf: printf: I/O error
space tmpfs                   64    64         0     100% /tmp
inodes tmpfs          0     0     0     - /tmp
"""


def test_directories_are_parsed_with_space_inodes_and_refusal() -> None:
    assert parse_places(PLACES) == {
        "home_space": DirectorySpace("/root", 81509188 * 1024, 16329790),
        "temporary_space": DirectorySpace("/tmp", 0, None, "I/O error"),
    }


def parse_output(output: str, trips: list[ClockTrip] = TRIPS) -> Facts:
    return parse_facts("csd0", output, trips, MACHINE_FACTS, Facts)


def parse(capture: str) -> Facts:
    return parse_output((CAPTURES / f"{capture}.txt").read_text())


def test_x86_server_is_parsed() -> None:
    facts = parse("x86_64-debian-12")
    assert (facts.architecture, facts.cpu_model, facts.num_cores) == ("x86_64", "AMD EPYC", 2)
    assert "avx512f" in facts.cpu_features
    assert facts.memory_bytes == 24684084 * 1024
    assert facts.memory_limit_bytes is None
    assert facts.cpu_limit is None
    assert (facts.python_version, facts.prefix, facts.glibc_version) == ("3.11.2", "/usr", "2.36")
    assert facts.tensorflow_version is None
    assert facts.home == "/tmp"
    assert facts.notes == ()


def test_busybox_without_python_gives_partial_facts() -> None:
    facts = parse("x86_64-busybox-1.35")
    assert (facts.architecture, facts.num_cores) == ("x86_64", 2)
    assert facts.disk_free_bytes == 78683328 * 1024
    assert facts.python_version is None
    assert [note.split(" unknown")[0] for note in facts.notes] == ["Python", "glibc"]
    assert "`python:`" in facts.notes[0]


def test_cortex_a53_is_named_by_lscpu_and_limits_missing_packages_and_musl_are_parsed() -> None:
    facts = parse("sample-cortex-a53")
    assert (facts.architecture, facts.cpu_model, facts.num_cores) == ("aarch64", "Cortex-A53", 4)
    assert "asimd" in facts.cpu_features
    assert (facts.num_threads, facts.mpi_version) == (1, "5.0.11")
    assert facts.cpu_limit == 1.5
    assert facts.memory_limit_bytes == facts.usable_memory_bytes == 4 << 30
    empty = parse("sample-raspberry-pi-4")
    assert (empty.mpi_version, empty.prefix) == (None, "/home/pi/my venv")
    assert any("empty package" in note for note in empty.notes)
    musl = parse("sample-buildroot-musl")
    assert (musl.cpu_limit, musl.memory_limit_bytes) == (2.5, 536870912)
    assert musl.memory_available_bytes == (902344 + 52112) * 1024
    assert musl.glibc_version is None
    assert any("musl" in note for note in musl.notes)


@pytest.mark.parametrize(
    ("trips", "offset_s", "note"),
    [
        (TRIPS, 0.5, ""),
        ([ClockTrip(1000.0, 0.0, "1000.%N\n")], 0.5, ""),
        ([ClockTrip(100_000.0, 0.0, "186400.0\n")], 86_400.0, "by +86400 s"),
        *(
            [[ClockTrip(1000.0, 0.1, said)], None, "clock unknown"]
            for said in ("9" * 400, "-1.5", "nan", "²")
        ),
    ],
)
def test_clock_is_measured_at_the_middle_of_the_fastest_round_trip(
    trips: list[ClockTrip], offset_s: float | None, note: str
) -> None:
    facts = parse_output((CAPTURES / "sample-cortex-a53.txt").read_text(), trips)
    assert facts.clock_offset_s == (None if offset_s is None else pytest.approx(offset_s))
    assert not note or any(note in line and len(line) < 200 for line in facts.notes)


def test_only_what_follows_a_marker_line_is_a_fact() -> None:
    login = "Welcome! csdctl-fact:architecture\nx86_64\n"
    assert parse_output(login + (CAPTURES / "sample-cortex-a53.txt").read_text()) == parse(
        "sample-cortex-a53"
    )
    with pytest.raises(RemoteCommandError, match="instead of facts"):
        parse_output("This system is for authorised use only.\n")


def examine(home: Path) -> Condition:
    with contextlib.closing(LocalSession("host", home)) as session:
        return collect(session, sys.executable, CONDITION_FACTS, Condition, scaled(60))


def test_this_machine_has_facts_and_a_condition(tmp_path: Path) -> None:
    condition = examine(tmp_path)
    assert condition.python_version == sys.version.split()[0]
    assert (condition.prefix, condition.num_cores) == (sys.prefix, os.cpu_count())
    assert condition.home == os.environ["HOME"]
    assert condition.keras_version
    assert condition.disk_free_bytes
    assert abs(condition.clock_offset_s or 99) < 5
    assert condition.has_prted is True
    assert "127.0.0.1" in (condition.addresses or ())
    assert condition.home_space is not None
    assert condition.home_space.path == str(tmp_path)
    assert condition.home_space.refusal == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(26)
def test_unwritable_home_is_reported() -> None:
    home_space = examine(Path("/proc")).home_space
    assert home_space is not None
    assert home_space.refusal


def facts_with(**environment: str) -> Facts:
    command = build_command(MACHINE_FACTS, sys.executable)
    return parse_output(subprocess.check_output(command, env=os.environ | environment, text=True))


def test_limits_come_from_the_environment_of_the_machine() -> None:
    facts = facts_with(CSDCTL_CPU_LIMIT="0.22", CSDCTL_MEMORY_LIMIT="1000000")
    assert (facts.cpu_limit, facts.memory_limit_bytes, facts.num_threads) == (0.22, 1000000, 1)


@pytest.mark.parametrize(
    ("output", "name", "memory_bytes", "driver"),
    [
        ("NVIDIA H100, 81559, 550.54.15\nNVIDIA L4, 23034, 550.5\n", "NVIDIA H100", 81559 << 20, "550.54.15"),
        ("Orin (nvgpu), [N/A], 540.4.0\n", "Orin (nvgpu)", None, "540.4.0"),
        ("NVIDIA GeForce GTX 1650\n", "NVIDIA GeForce GTX 1650", None, None),
    ],
)
def test_first_gpu_is_parsed(output: str, name: str, memory_bytes: int | None, driver: str | None) -> None:
    expected = {"accelerator": name, "accelerator_memory_bytes": memory_bytes, "driver_version": driver}
    assert parse_gpu(output) == expected


@pytest.mark.parametrize(
    ("nvidia_smi", "accelerator"),
    [
        (None, None),
        ("echo 'NVIDIA L4, 23034, 550.54.15'", "NVIDIA L4"),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9", None),
    ],
)
def test_gpu_is_the_one_that_nvidia_smi_lists(
    tmp_path: Path, nvidia_smi: str | None, accelerator: str | None
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    (tmp_path / "nvidia-smi").chmod(0o700 if nvidia_smi else 0o600)
    facts = facts_with(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert facts.accelerator == accelerator
    assert not any("GPU" in note for note in facts.notes)


@pytest.mark.parametrize("python", ["no-such-python", "/bin/false", "$(touch pwned)"])
def test_wrong_python_is_noted_and_other_facts_are_kept(tmp_path: Path, python: str) -> None:
    facts = collect_facts(LocalSession("host", tmp_path), python)
    assert facts.python_version is None
    assert any(note.startswith("Python unknown") for note in facts.notes)
    assert facts.num_cores
    assert not (tmp_path / "pwned").exists()


@pytest.mark.attack(11)
@pytest.mark.parametrize(
    ("name", "answer", "field", "note"),
    [
        ("memory", "", "memory_bytes", "memory unknown"),
        ("memory", f"MemTotal: {10**30} kB", "memory_bytes", "memory bytes is 1024000"),
        ("memory", f"MemTotal: {'9' * 4299} kB", "memory_bytes", "a huge number"),
        ("CPU", "processor : 0\n" * 70_000, "num_cores", "num cores is 70000"),
        ("CPU", f"processor : 0\nmodel name : {'A' * 900_000}", "cpu_model", "(900,002 characters)"),
        ("limits", "cpu.max 100000 0", "cpu_limit", "limits unknown: the period of its CPU quota is '0'"),
        ("limits", "cpus_allowed 9-0", "cpu_limit", "cpu limit is -8.0"),
        ("disk", f"x 1 0 {'9' * 900} 0% /", "disk_free_bytes", "(904 characters)"),
        ("Python", "[" * 900_000, "python_version", "Python unknown: it does not run ([[["),
        ("GPU", f"L4, {'9' * 5000}, 550", "accelerator", "GPU unknown"),
        ("GPU", "L4, 1, \x1b[2J", "driver_version", "driver version is "),
        ("home", "/a\x1b[2J", "home", "home is '/a"),
        ("NVMe drives", "begin\ncontroller \x1b[2J\nserial S", "drives", "NVMe drives unknown: device is"),
        ("addresses", " |-- 999.1.1.1\n /32 host LOCAL", "addresses", "addresses is"),
        ("limits", f"Max open files 1 {'9' * 5000} files", "limits", "limits unknown"),
        ("places", f"place /\nplace /\nspace x 1 1 {'9' * 400} 1% /", "home_space", "places unknown"),
        ("places", "place a\x1b\nplace /", "home_space", "places unknown"),
    ],
)
def test_answer_out_of_range_is_noted_and_other_facts_are_kept(
    name: str, answer: str, field: str, note: str
) -> None:
    text = (CAPTURES / "sample-cortex-a53.txt").read_text()
    before, _, following = text.partition(f"csdctl-fact:{name}\n")
    _, marker, after = following.partition("csdctl-fact:")
    output = f"{before}csdctl-fact:{name}\n{answer}\n{marker}{after}"
    facts = parse_facts("csd0", output, TRIPS, CONDITION_FACTS, Condition)
    assert not getattr(facts, field)
    assert facts.architecture == "aarch64"
    assert any(note in line for line in facts.notes)
    assert all(len(line) < 400 for line in facts.notes)


def test_big_and_little_cores_are_both_named() -> None:
    cores = "processor : 0\nCPU part : 0xd03\n\nprocessor : 1\nCPU part : 0xd09\n"
    assert parse_cpuinfo(cores)["cpu_model"] == "0xd03"
    facts = parse_cpuinfo(f"{cores}Model name: Cortex-A53\nModel: 4\nModel name: Cortex-A73\n")
    assert (facts["cpu_model"], facts["num_cores"]) == ("Cortex-A53 + Cortex-A73", 2)


@pytest.mark.parametrize(
    ("lines", "cpu_limit", "memory_limit"),
    [
        ("cpus_allowed", None, None),
        ("cpu.max 22000 100000\nmemory.max 1073741824", 0.22, 1 << 30),
        ("cpu.cfs_quota_us 200000\ncpu.cfs_period_us 100000", 2.0, None),
        ("memory.limit_in_bytes 9223372036854771712", None, None),
        ("cpus_allowed 0-1,4", 3.0, None),
        ("cpu_environment 3\ncpu.max 200000 100000\nmemory_environment 9\nmemory.max 10", 2.0, 9),
    ],
)
def test_tightest_limit_wins(lines: str, cpu_limit: float | None, memory_limit: int | None) -> None:
    limits = parse_limits(lines)
    assert (limits["cpu_limit"], limits["memory_limit_bytes"]) == (cpu_limit, memory_limit)


def test_invalid_limit_in_the_environment_is_reported_and_limits_of_processes_are_known() -> None:
    limits = parse_limits("Max open files 16 16 files\ncpu_environment nan")
    problem = "limits unknown: CSDCTL_CPU_LIMIT is 'nan' there, expected a positive number"
    assert limits == {"limits": (("open files", 16),), "notes": (problem,)}


def test_disk_with_a_space_in_its_mount_point_is_read() -> None:
    text = (
        "Filesystem 1024-blocks Used Available Capacity Mounted\n//nas/my share 100 60 40 60% /mnt/my disk\n"
    )
    assert parse_disk_free(text) == {"disk_free_bytes": 40960}


def test_glibc_is_read_from_ldd() -> None:
    text = "ldd (Debian GLIBC 2.28-10+deb10u3) 2.28\nCopyright (C) 2018\n"
    assert parse_glibc(text) == {"glibc_version": "2.28"}


def add_drive(sys: Path, controller: str, serial: str, model: str, **sectors: int) -> None:
    """A tree as in Linux: values are padded with blanks to the width of the NVMe field."""
    directory = sys / "class" / "nvme" / controller
    directory.mkdir(parents=True)
    (directory / "serial").write_text(f"{serial:<20}\n")
    (directory / "model").write_text(f"{model:<40}\n")
    for namespace, size in sectors.items():
        (directory / namespace).mkdir()
        block = sys / "block" / namespace.replace("c1n", "n")
        block.mkdir(parents=True, exist_ok=True)
        (block / "size").write_text(f"{size}\n")


def test_drives_with_a_serial_are_listed_with_sizes_in_numeric_order(tmp_path: Path) -> None:
    add_drive(tmp_path, "nvme10", "S10", "NGD Newport", nvme10n1=1000)
    add_drive(tmp_path, "nvme2", "S2", "Boot drive", nvme2n1=10, nvme2n2=20)
    add_drive(tmp_path, "nvme3", "S3", "No namespace")
    add_drive(tmp_path, "nvme0", "S0", "Dual port", nvme0c1n1=8)  # behind multipath
    add_drive(tmp_path, "nvme1", "", "Unnamed", nvme1n1=8)
    script = NVME_SCRIPT.replace("/sys/", f"{tmp_path}/")
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert printed.stderr == ""
    assert parse_nvme(printed.stdout)["drives"] == (
        Drive("/dev/nvme0", "S0", "Dual port", 4096),
        Drive("/dev/nvme2", "S2", "Boot drive", 30 * 512),
        Drive("/dev/nvme3", "S3", "No namespace", None),
        Drive("/dev/nvme10", "S10", "NGD Newport", 512_000),
    )
    with pytest.raises(ValueError, match="no output"):
        parse_nvme("")
