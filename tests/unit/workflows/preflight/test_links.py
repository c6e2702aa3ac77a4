"""What is said of links."""

import pytest

from csdctl.fleet.checks import FLEET_NAME, Check, Status
from csdctl.worker.protocol.events import NodeLost, SumTimed
from csdctl.worker.protocol.sandbox import SandboxCheck
from csdctl.workflows.preflight.links import LinkCheck, judge_links, judge_sandbox

MACHINES = ["host", "csd0", "csd1"]


def judge(joined: set[str], lost: dict[str, NodeLost], num_ranks: int = 3) -> dict[str, Check]:
    sums = [SumTimed(0, "host", tuple(range(num_ranks)), 1 << 20, 0.003)] if num_ranks else []
    return {check.machine: check for check in judge_links(MACHINES, LinkCheck(joined, lost, sums))}


def test_links_that_connect_are_green_and_the_time_of_a_sum_is_shown() -> None:
    checks = judge({"csd0", "csd1"}, {})
    assert {check.status for check in checks.values()} == {Status.OK}
    assert checks[FLEET_NAME].found == "3 ranks, a sum of 1 MiB in 3.0 ms"


@pytest.mark.fault(50)
def test_link_that_does_not_connect_is_red_and_the_sum_is_over_the_others() -> None:
    checks = judge({"csd0"}, {"csd1": NodeLost(2, "csd1", "its link did not connect: no route")}, 2)
    assert (checks["csd1"].status, checks["csd1"].found) == (
        Status.FAIL,
        "its link did not connect: no route",
    )
    assert "firewalls and routes" in checks["csd1"].remedy
    assert checks["csd0"].status == Status.OK
    assert checks[FLEET_NAME].found.startswith("2 ranks")


def test_link_that_connects_and_is_lost_in_a_large_sum_points_to_large_packets() -> None:
    loss = NodeLost(2, "csd1", "its link was lost", "check the node")
    assert "MTU" in judge({"csd0", "csd1"}, {"csd1": loss})["csd1"].remedy
    assert judge({"csd0"}, {"csd1": loss})["csd1"].remedy == "check the node"


def test_machine_without_a_sandbox_is_amber_with_what_follows_for_its_ports() -> None:
    check = judge_sandbox("csd1", SandboxCheck("no Landlock"))
    assert (check.status, check.found) == (Status.WARN, "no Landlock")
    assert "ports" in check.remedy
    assert "exclude the machine" in check.remedy
    assert judge_sandbox("csd1", SandboxCheck("")).status == Status.OK
