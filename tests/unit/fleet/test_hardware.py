"""Groups of equal machines, drives of nodes, errors with one cause, and which machines share measurements."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.errors import AuthenticationError, CsdctlError, UnreachableError
from csdctl.fleet.facts import Drive, Facts
from csdctl.fleet.hardware import (
    choose_device,
    classify_fleet,
    classify_machine,
    find_differences,
    group_machines,
    match_drives,
    round_memory_up,
)
from csdctl.fleet.model import Fleet, Node, fold_problems

GIB = 1 << 30
CSD_FACTS = Facts(
    "csd0",
    architecture="aarch64",
    cpu_model="Cortex-A53",
    cpu_features=("asimd", "fp"),
    num_cores=4,
    memory_bytes=int(5.78 * GIB),
    memory_available_bytes=5 * GIB,
    python_version="3.11.7",
    tensorflow_version="2.21.0",
    keras_version="3.15.1",
    numpy_version="2.1.0",
)
CSD = replace(CSD_FACTS, memory_bytes=6 * GIB)


def csds(*numbers: int, **changes: object) -> list[Facts]:
    return [replace(CSD, name=f"csd{number}", **changes) for number in numbers]  # type: ignore[arg-type]


class TestGroups:
    def test_equal_machines_are_one_group(self) -> None:
        machines = [replace(CSD, name="host"), *csds(0, 1), *csds(2, num_cores=2), *csds(3)]
        machines += csds(9, problem="gone")
        groups = [[facts.name for facts in group] for group in group_machines(machines)]
        assert groups == [["host"], ["csd0", "csd1", "csd3"], ["csd2"]]

    def test_outliers_are_compared_with_the_majority(self) -> None:
        machines = [*csds(*range(5)), *csds(7, tensorflow_version=None), *csds(8, memory_bytes=4 << 30)]
        differences = find_differences(group_machines(machines))
        assert {group[0].name: text for group, text in differences.items()} == {
            "csd7": "TensorFlow missing instead of 2.21.0",
            "csd8": "memory 4 GiB instead of 6 GiB",
        }


BOOT, FIRST, SECOND = (
    Drive(f"/dev/nvme{k}", f"S{k}", model) for k, model in ((0, "boot"), (4, "CSD"), (5, "CSD"))
)
BLANK, ZEROS = Drive("/dev/nvme1", "  ", "CSD"), Drive("/dev/nvme1", "0000000000", "CSD")


@pytest.mark.parametrize(
    ("of_host", "of_nodes", "matches"),
    [
        ((BOOT, FIRST, SECOND), [(SECOND,), (FIRST,), ()], {"csd0": "/dev/nvme5", "csd1": "/dev/nvme4"}),
        ((BOOT, FIRST), [(FIRST,), (FIRST,)], {}),  # two nodes have it
        ((BOOT, FIRST, SECOND), [(BOOT, FIRST, SECOND)], {}),  # the host itself
        ((BLANK,), [(BLANK,)], {}),
        ((ZEROS,), [(ZEROS,)], {}),
        ((FIRST, replace(FIRST, device="/dev/nvme9")), [(FIRST,)], {"csd0": "/dev/nvme4"}),  # two ports of it
    ],
)
def test_node_with_a_serial_that_the_host_alone_has_too_is_that_drive(
    of_host: tuple[Drive, ...], of_nodes: list[tuple[Drive, ...]], matches: dict[str, str]
) -> None:
    machines = {
        f"csd{number}": Facts(f"csd{number}", drives=drives) for number, drives in enumerate(of_nodes)
    }
    drives = match_drives({"host": Facts("host", drives=of_host), **machines})
    assert {name: drive.device for name, drive in drives.items()} == matches


def test_errors_that_differ_only_in_the_address_are_one_problem() -> None:
    fleet = Fleet(tuple(Node(f"csd{k}", f"10.0.0.{k + 2}") for k in range(10)))
    failed: dict[str, CsdctlError] = {
        f"csd{k}": UnreachableError(f"10.0.0.{k + 2} port 22 is closed", remedy="start sshd")
        for k in range(3, 10)
    }
    failed |= {
        f"csd{k}": AuthenticationError("key not accepted", remedy=f"ssh-copy-id root@10.0.0.{k + 2}")
        for k in range(2)
    }
    assert [(p.names, p.message, p.remedy) for p in fold_problems(failed, fleet)] == [
        (tuple(f"csd{k}" for k in range(3, 10)), "10.0.0.[5-11] port 22 is closed", "start sshd"),
        (("csd0", "csd1"), "key not accepted", "ssh-copy-id root@10.0.0.2 (shown for csd0)"),
    ]


def key(**changes: object) -> str:
    return classify_machine(replace(CSD_FACTS, **changes)).key  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"name": "csd7", "home": "/elsewhere", "clock_offset_s": 3.0, "notes": ("slow clock",)}, True),
        ({"memory_available_bytes": 1 * GIB, "disk_free_bytes": 5}, True),
        ({"memory_bytes": int(5.71 * GIB)}, True),
        ({"cpu_features": ("fp", "asimd")}, True),
        ({"python_version": "3.11.9"}, True),
        ({"cpu_limit": 0.22}, False),
        ({"num_cores": 2}, False),
        ({"cpu_model": "Cortex-A72"}, False),
        ({"cpu_features": ("asimd", "asimddp", "fp")}, False),
        ({"memory_limit_bytes": 2 * GIB}, False),
        ({"architecture": "x86_64"}, False),
        ({"python_version": "3.12.7"}, False),
        ({"tensorflow_version": "2.20.0"}, False),
        ({"keras_version": "3.14.0"}, False),
        ({"numpy_version": "2.2.0"}, False),
        ({"accelerator": "NVIDIA L4"}, False),
    ],
)
def test_class_follows_from_hardware_limits_and_software(changes: dict[str, object], is_same: bool) -> None:
    assert (key(**changes) == key()) is is_same


@pytest.mark.parametrize(
    ("device", "accelerator", "has_cuda", "chosen"),
    [
        ("auto", None, True, "cpu"),
        ("auto", "NVIDIA L4", False, "cpu"),
        ("auto", "NVIDIA L4", True, "auto"),
        ("auto", "NVIDIA L4", None, "auto"),  # CUDA may be the system's
        ("gpu", None, False, "gpu"),  # which the rank refuses
        ("cpu", "NVIDIA L4", True, "cpu"),
    ],
)
def test_auto_is_the_cpu_where_no_gpu_can_be_used(
    device: str, accelerator: str | None, has_cuda: bool | None, chosen: str
) -> None:
    facts = replace(CSD_FACTS, accelerator=accelerator, has_cuda=has_cuda)
    assert choose_device(Fleet((Node("csd0", "a", device=device),)), facts) == chosen


def test_emulated_machines_have_their_own_classes_by_number_of_nodes() -> None:
    keys = {classify_machine(CSD_FACTS, num_emulated=number).key for number in (0, 2, 4)}
    assert len(keys) == 3
    assert "emulated with 4 nodes" in classify_machine(CSD_FACTS, num_emulated=4).name


class TestFleets:
    def test_host_node_classes_and_network_matter(self) -> None:
        host, csd4, csd2 = (classify_machine(replace(CSD_FACTS, num_cores=cores)) for cores in (8, 4, 2))
        fleets = [
            classify_fleet(host, [csd4], ""),
            classify_fleet(csd4, [host], ""),
            classify_fleet(host, [csd2], ""),
            classify_fleet(host, [csd4, csd2], ""),
            classify_fleet(host, [csd4], "10.1.1.0/24"),
        ]
        assert len({fleet.key for fleet in fleets}) == len(fleets)
        assert classify_fleet(host, [csd4, csd2, csd4], "").key == fleets[3].key


@given(st.integers(min_value=1, max_value=2**50))
def test_memory_is_rounded_up_by_a_quarter_at_most(num_bytes: int) -> None:
    rounded = round_memory_up(num_bytes)
    assert num_bytes <= rounded <= num_bytes * 1.25 or num_bytes < 4
    assert round_memory_up(rounded) == rounded


@given(st.sampled_from([2, 4, 6, 8, 16, 24, 32, 64]), st.floats(0.9, 1.0))
def test_equal_machines_round_to_the_same_memory(gib: int, reported_share: float) -> None:
    assert round_memory_up(int(gib * GIB * reported_share)) == gib * GIB
