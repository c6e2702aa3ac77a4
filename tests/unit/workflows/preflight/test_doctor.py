"""The exit code of an examination, and the diagnosis of a failed MPI check."""

from pathlib import Path

import pytest

from csdctl.errors import ExitCode
from csdctl.fleet.checks import FLEET_NAME, Check, Status
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.mpi_job import JobOutcome
from csdctl.worker.protocol.events import Event, Exited, Failed, Finished, MpiChecked, Ready, Started
from csdctl.workflows.preflight.doctor import Examination, judge_mpi_check

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")))
MACHINES = ["host", "csd0", "csd1"]


def exit_code(*red: tuple[str, str], overdue: str = "") -> int:
    """Return the exit code of `csdctl doctor` when these checks of machines are red."""
    examination = Examination(FLEET, lambda check: None, overdue=overdue)
    examination.add(Check("csd0", "clock", Status.WARN, "+3 s off"))
    for machine, name in red:
        examination.add(Check(machine, name, Status.FAIL, "bad"))
    try:
        examination.check()
    except Exception as error:
        return int(error.exit_code)  # type: ignore[attr-defined]
    return 0


def test_amber_is_not_a_failure() -> None:
    assert exit_code() == ExitCode.DONE


@pytest.mark.parametrize(
    ("red", "code"),
    [
        ([("csd1", "MPI")], ExitCode.PARTIAL),
        ([("csd1", "reach")], ExitCode.PARTIAL),
        ([("csd0", "MPI"), ("csd1", "disk")], ExitCode.FAILED),
        ([("host", "mpirun")], ExitCode.FAILED),
        ([(FLEET_NAME, "allreduce")], ExitCode.FAILED),
        ([(FLEET_NAME, "allreduce"), ("csd1", "allreduce")], ExitCode.FAILED),
        ([("csd0", "reach"), ("csd1", "reach")], ExitCode.UNREACHABLE),
    ],
)
def test_exit_code_depends_on_the_failed_machines(red: list[tuple[str, str]], code: ExitCode) -> None:
    assert exit_code(*red) == code


def test_passed_deadline_has_its_own_exit_code() -> None:
    assert exit_code(("csd1", "MPI"), overdue="connecting") == ExitCode.DEADLINE


def judge(events: list[Event], *, is_overdue: bool = False) -> Check:
    return judge_mpi_check(MACHINES, JobOutcome(events, is_overdue=is_overdue), 60, Path("logs"))


def of_all(*types: type[Event], library: str = "Open MPI v5.0.11") -> list[Event]:
    """Return events of these types from all machines."""
    make = {
        Started: lambda rank, name: Started(rank, name, name),
        Ready: lambda rank, name: Ready(rank, name, 0, 1.0),
        MpiChecked: lambda rank, name: MpiChecked(rank, name, library, 1 << 20, 0.003),
        Finished: lambda rank, name: Finished(rank, name, 0, 5, "", 0),
    }
    return [make[event_type](rank, name) for event_type in types for rank, name in enumerate(MACHINES)]


def test_successful_check_shows_mpi_and_the_time_of_a_sum() -> None:
    check = judge(of_all(Started, Ready, MpiChecked, Finished))
    assert check.status == Status.OK
    assert check.found == "3 ranks, Open MPI v5.0.11, a sum of 1 MiB in 3.0 ms"


@pytest.mark.fault(49)
def test_two_versions_of_mpi_are_red_even_when_they_communicate() -> None:
    events = of_all(Started, Ready, MpiChecked, Finished)
    events[6] = MpiChecked(0, "host", "Open MPI v5.0.10", 1 << 20, 0.003)
    check = judge(events)
    assert check.status == Status.FAIL
    assert "host uses Open MPI v5.0.10; csd0 uses Open MPI v5.0.11" in check.found


@pytest.mark.fault(50)
def test_ranks_that_hang_in_mpi_init_are_named() -> None:
    events = of_all(Started)
    check = judge([*events, Ready(0, "host", 0, 1.0)], is_overdue=True)
    assert check.found == "csd0, csd1 started but did not complete MPI_Init within 60 s"
    assert "network:" in check.remedy


def test_machines_that_never_started_a_rank_are_named() -> None:
    check = judge([Started(0, "host", "server")], is_overdue=True)
    assert check.found == "csd0, csd1 never started a rank within 60 s"
    assert "prted" in check.remedy


def test_failed_rank_is_reported_with_its_own_message() -> None:
    failed = Failed(1, "csd0", "MPI cannot be entered: ImportError: no libmpi", "reinstall mpi4py")
    check = judge([*of_all(Started), failed])
    assert check.found == "csd0: MPI cannot be entered: ImportError: no libmpi"
    assert check.remedy.startswith("reinstall mpi4py")


def test_rank_that_was_killed_is_named() -> None:
    check = judge([*of_all(Started), Exited(2, "csd1", 139)])
    assert check.found == "csd1: rank 2 was killed by signal 11"
