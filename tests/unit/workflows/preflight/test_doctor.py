"""The exit code of an examination, the diagnosis of a failed MPI check, and what is said of open ports."""

from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import ExitCode
from csdctl.fleet.checks import FLEET_NAME, Check, Status
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.mpi_job import JobOutcome
from csdctl.worker.protocol.events import Event, Exited, Failed, Finished, MpiChecked, Ready, Started
from csdctl.worker.protocol.sandbox import SandboxCheck
from csdctl.workflows.preflight.doctor import Examination, judge_listeners, judge_mpi_check, judge_sandbox

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")), network="10.1.1.0/24")
OPEN = SandboxCheck("", "several addresses are in the network")
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


@pytest.mark.parametrize(
    ("red", "code"),
    [
        ([], ExitCode.DONE),  # amber is not a failure
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


BROKEN = Failed(1, "csd0", "MPI cannot be entered: ImportError: no libmpi", "reinstall mpi4py")


def judge(events: list[Event], *, is_overdue: bool = False) -> Check:
    return judge_mpi_check(MACHINES, JobOutcome(events, MACHINES, is_overdue=is_overdue), 60, Path("logs"))


def of_all(*types: type[Event], library: str = "Open MPI v5.0.11") -> list[Event]:
    """Return events of these types from all machines."""
    make = {
        Started: lambda rank, name: Started(rank, name, name),
        Ready: lambda rank, name: Ready(rank, name, 0),
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


@pytest.mark.parametrize(
    ("events", "found", "remedy"),
    [
        (of_all(Started)[:1], "csd0, csd1 never started a rank within 60 s", "prted"),
        pytest.param(
            [*of_all(Started), Ready(0, "host", 0)],
            "csd0, csd1 started but did not complete MPI_Init within 60 s",
            "network:",
            marks=pytest.mark.fault(50),
        ),
        ([*of_all(Started), BROKEN], "csd0: MPI cannot be entered", "reinstall mpi4py"),
        ([*of_all(Started), Exited(2, "csd1", 139)], "csd1: rank 2 was killed by signal 11", ""),
    ],
)
def test_machine_whose_rank_failed_or_hangs_is_named(events: list[Event], found: str, remedy: str) -> None:
    check = judge(events, is_overdue=isinstance(events[-1], Started | Ready))
    assert check.found.startswith(found)
    assert remedy in check.remedy


def test_machine_without_a_sandbox_is_amber_with_what_follows_for_its_ports() -> None:
    check = judge_sandbox("csd1", SandboxCheck("no Landlock"))
    assert (check.status, check.found) == (Status.WARN, "no Landlock")
    assert "ports" in check.remedy
    assert "exclude the machine" in check.remedy
    assert judge_sandbox("csd1", SandboxCheck("")).status == Status.OK


@pytest.mark.parametrize(
    ("fleet", "machine", "remedy"),
    [(replace(FLEET, network=""), FLEET_NAME, "set `network:`"), (FLEET, "csd1", "firewall")],
)
def test_open_ports_are_of_the_fleet_without_a_network_or_of_a_machine(
    fleet: Fleet, machine: str, remedy: str
) -> None:
    (check,) = judge_listeners(fleet, {"csd0": SandboxCheck(""), "csd1": OPEN})
    assert (check.machine, check.status) == (machine, Status.WARN)
    assert remedy in check.remedy
    assert judge_listeners(FLEET, {"csd0": SandboxCheck("")}) == []
