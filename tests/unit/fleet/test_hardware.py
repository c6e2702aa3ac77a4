"""Groups of equal machines, drives of nodes, and errors with one cause."""

from dataclasses import replace

import pytest

from csdctl.errors import AuthenticationError, CsdctlError, UnreachableError
from csdctl.fleet.facts import Drive, Facts
from csdctl.fleet.hardware import find_differences, group_machines, match_drives
from csdctl.fleet.model import Fleet, Node, fold_problems

CSD = Facts(
    "csd0",
    architecture="aarch64",
    cpu_model="Cortex-A53",
    num_cores=4,
    memory_bytes=6 << 30,
    tensorflow_version="2.21.0",
)


def csds(*numbers: int, **changes: object) -> list[Facts]:
    return [replace(CSD, name=f"csd{number}", **changes) for number in numbers]  # type: ignore[arg-type]


class TestGroups:
    def test_equal_machines_are_one_group(self) -> None:
        machines = [replace(CSD, name="host"), *csds(0, 1), *csds(2, num_cores=2), *csds(3)]
        groups = group_machines(machines)
        assert [group.names for group in groups] == [("host",), ("csd0", "csd1", "csd3"), ("csd2",)]

    def test_small_memory_differences_are_tolerated_and_large_ones_are_not(self) -> None:
        sizes = [6_000, 6_100, 6_179, 6_500, 3_000]
        machines = [fact for k, size in enumerate(sizes) for fact in csds(k, memory_bytes=size << 20)]
        groups = group_machines(machines)
        assert [group.names for group in groups] == [("csd0", "csd1", "csd2"), ("csd3",), ("csd4",)]

    def test_failed_machines_are_in_no_group(self) -> None:
        assert group_machines(csds(0, problem="gone")) == []

    def test_group_has_least_and_most(self) -> None:
        (group,) = group_machines([*csds(0, disk_free_bytes=5), *csds(1, disk_free_bytes=3), *csds(2)])
        assert (group.least("disk_free_bytes"), group.most("disk_free_bytes")) == (3, 5)
        assert group.least("round_trip_s") is None

    def test_outliers_are_compared_with_the_majority(self) -> None:
        machines = [*csds(*range(5)), *csds(7, tensorflow_version=None), *csds(8, memory_bytes=4 << 30)]
        found = [(group.names, text) for group, text in find_differences(group_machines(machines))]
        assert found == [
            (("csd7",), "TensorFlow missing instead of 2.21.0"),
            (("csd8",), "memory 4.0 GiB instead of 6.0 GiB"),
        ]

    def test_without_a_majority_there_are_no_outliers(self) -> None:
        assert find_differences(group_machines([*csds(0), *csds(1, num_cores=2)])) == []


class TestDrives:
    HOST = Facts(
        "host",
        drives=(
            Drive("/dev/nvme0", "S0", "boot"),
            Drive("/dev/nvme4", "S4", "CSD"),
            Drive("/dev/nvme5", "S5", "CSD"),
        ),
    )

    def matches(self, *nodes: Facts, host: Facts = HOST) -> dict[str, str]:
        found = match_drives({one.name: one for one in (host, *nodes)})
        return {name: drive.device for name, drive in found.items()}

    def test_node_with_a_serial_of_the_host_is_that_drive(self) -> None:
        nodes = [
            *csds(0, drives=(Drive("/dev/nvme0", "S5", "CSD"),)),
            *csds(1, drives=(Drive("/dev/nvme0", "S4", "CSD"),)),
            *csds(2),
        ]
        assert self.matches(*nodes) == {"csd0": "/dev/nvme5", "csd1": "/dev/nvme4"}

    def test_serial_of_two_nodes_proves_nothing(self) -> None:
        assert self.matches(*csds(0, 1, drives=(Drive("/dev/nvme0", "S4", "CSD"),))) == {}

    @pytest.mark.parametrize("serial", ["", " ", "0000000000", "--------"])
    def test_blank_serial_proves_nothing(self, serial: str) -> None:
        drive = Drive("/dev/nvme0", serial, "CSD")
        assert self.matches(*csds(0, drives=(drive,)), host=Facts("host", drives=(drive,))) == {}

    def test_same_serial_of_another_model_is_another_drive(self) -> None:
        assert self.matches(*csds(0, drives=(Drive("/dev/nvme0", "S4", "other maker's"),))) == {}

    def test_serial_of_two_host_drives_proves_nothing(self) -> None:
        host = Facts("host", drives=(Drive("/dev/nvme0", "S4", "CSD"), Drive("/dev/nvme1", "S4", "boot")))
        assert self.matches(*csds(0, drives=(Drive("/dev/nvme0", "S4", "CSD"),)), host=host) == {}

    def test_node_that_sees_all_drives_of_the_host_is_none_of_them(self) -> None:
        assert self.matches(*csds(0, drives=self.HOST.drives)) == {}

    def test_two_ports_of_one_drive_are_one_drive(self) -> None:
        host = Facts("host", drives=(Drive("/dev/nvme0", "S4", "CSD"), Drive("/dev/nvme1", "S4", "CSD")))
        assert self.matches(*csds(0, drives=(Drive("/dev/nvme0", "S4", "CSD"),)), host=host) == {
            "csd0": "/dev/nvme0"
        }


class TestProblems:
    FLEET = Fleet(tuple(Node(f"csd{k}", f"10.0.0.{k + 2}") for k in range(10)))

    def test_errors_that_differ_only_in_the_address_are_one_problem(self) -> None:
        failed: dict[str, CsdctlError] = {
            f"csd{k}": UnreachableError(f"10.0.0.{k + 2} port 22 is closed", remedy="start sshd")
            for k in range(3, 10)
        }
        failed["csd1"] = AuthenticationError("key not accepted", remedy="ssh-copy-id root@10.0.0.3")
        problems = fold_problems(failed, self.FLEET)
        assert [(p.names, p.message, p.remedy) for p in problems] == [
            (tuple(f"csd{k}" for k in range(3, 10)), "10.0.0.[5-11] port 22 is closed", "start sshd"),
            (("csd1",), "key not accepted", "ssh-copy-id root@10.0.0.3"),
        ]

    def test_different_remedies_are_shown_for_one_node(self) -> None:
        failed: dict[str, CsdctlError] = {
            f"csd{k}": AuthenticationError("key not accepted", remedy=f"ssh-copy-id root@10.0.0.{k + 2}")
            for k in range(2)
        }
        (problem,) = fold_problems(failed, self.FLEET)
        assert problem.remedy == "ssh-copy-id root@10.0.0.2 (shown for csd0)"

    def test_address_with_a_common_prefix_is_not_confused(self) -> None:
        fleet = Fleet((Node("a", "10.0.0.1"), Node("b", "10.0.0.11")))
        failed: dict[str, CsdctlError] = {
            "a": UnreachableError("10.0.0.1 is closed"),
            "b": UnreachableError("10.0.0.11 is closed"),
        }
        (problem,) = fold_problems(failed, fleet)
        assert problem.message == "10.0.0.1, 10.0.0.11 is closed"
