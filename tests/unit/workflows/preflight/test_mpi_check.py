"""What `doctor` says about machines on which MPI cannot be confined, or listens at more than it should."""

from dataclasses import replace

from csdctl.fleet.checks import FLEET_NAME, Status
from csdctl.fleet.model import Fleet, Node
from csdctl.worker.protocol.sandbox import SandboxCheck
from csdctl.workflows.preflight.doctor import judge_listeners, judge_sandbox

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")), network="10.1.1.0/24")
OPEN = SandboxCheck("", "several addresses are in the network")


def test_machine_without_a_sandbox_is_amber_with_what_follows_for_its_ports() -> None:
    check = judge_sandbox("csd1", SandboxCheck("no Landlock"))
    assert (check.status, check.found) == (Status.WARN, "no Landlock")
    assert "ports" in check.remedy
    assert "exclude the machine" in check.remedy
    assert judge_sandbox("csd1", SandboxCheck("")).status == Status.OK


def test_fleet_without_a_network_is_told_that_ports_are_open() -> None:
    (check,) = judge_listeners(replace(FLEET, network=""), {"csd0": OPEN, "csd1": OPEN})
    assert (check.machine, check.status) == (FLEET_NAME, Status.WARN)
    assert "set `network:`" in check.remedy


def test_machine_that_cannot_close_its_ports_is_named_with_the_remedy() -> None:
    (check,) = judge_listeners(FLEET, {"csd0": SandboxCheck(""), "csd1": OPEN})
    assert (check.machine, check.status, check.found) == ("csd1", Status.WARN, OPEN.why_open)
    assert "firewall" in check.remedy
    assert judge_listeners(FLEET, {"csd0": SandboxCheck("")}) == []
