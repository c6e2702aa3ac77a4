"""The exit code of an examination."""

import pytest

from csdctl.errors import ExitCode
from csdctl.fleet.checks import FLEET_NAME, Check, Status
from csdctl.fleet.model import Fleet, Node
from csdctl.transport.session import Deadline
from csdctl.workflows.preflight.examination import Examination, check_fitness

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")), network="10.1.1.0/24")


def exit_code(*red: tuple[str, str], overdue: str = "") -> int:
    """Return the exit code of `csdctl doctor` when these checks of machines are red."""
    examination = Examination(FLEET, Deadline(60.0), overdue=overdue)
    examination.add(Check("csd0", "clock", Status.WARN, "+3 s off"))
    for machine, name in red:
        examination.add(Check(machine, name, Status.FAIL, "bad"))
    try:
        check_fitness(examination)
    except Exception as error:
        return int(error.exit_code)  # type: ignore[attr-defined]
    return 0


@pytest.mark.parametrize(
    ("red", "code"),
    [
        ([], ExitCode.DONE),  # amber is not a failure
        ([("csd1", "MPI")], ExitCode.PARTIAL),
        ([("csd1", "reach")], ExitCode.PARTIAL),
        ([("csd0", "MPI"), ("csd1", "disk")], ExitCode.FAILED),
        ([("host", "mpirun")], ExitCode.FAILED),
        ([(FLEET_NAME, "sum")], ExitCode.FAILED),
        ([(FLEET_NAME, "sum"), ("csd1", "link")], ExitCode.FAILED),
        ([("csd0", "reach"), ("csd1", "reach")], ExitCode.UNREACHABLE),
    ],
)
def test_exit_code_depends_on_the_failed_machines(red: list[tuple[str, str]], code: ExitCode) -> None:
    assert exit_code(*red) == code


def test_passed_deadline_has_its_own_exit_code() -> None:
    assert exit_code(("csd1", "MPI"), overdue="connecting") == ExitCode.DEADLINE
