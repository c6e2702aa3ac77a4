"""The checks of one examination, and the error that follows from them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from csdctl.errors import CsdctlError, DeadlineError, NodeError, NoNodeReachableError, PartialError
from csdctl.fleet.checks import FLEET_NAME, Check, Status, failed_machines
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.imports import JobImports

REPAIR = "fix what is red above"

OnCheck = Callable[[Check], None]


@dataclass
class Examination:
    """The checks so far; `on_check` is called with each of them as soon as it is known."""

    fleet: Fleet
    on_check: OnCheck
    imports: JobImports | None = None
    """Of the job's own code, when there is a job."""
    checks: list[Check] = field(default_factory=list)
    overdue: str = ""
    """The part that was not finished when the deadline passed; '' when it did not pass."""

    def add(self, check: Check) -> None:
        """Record one check and pass it on."""
        self.checks.append(check)
        self.on_check(check)

    @property
    def red(self) -> list[str]:
        """The machines with a red check; including `fleet` when a check of the whole fleet is red."""
        return failed_machines(self.checks)

    def check(self) -> None:
        """Raise the error that determines the exit code; do nothing when no check is red."""
        nodes = [node.name for node in self.fleet.nodes]
        unreachable = [
            check.machine for check in self.checks if check.check == "reach" and check.status == Status.FAIL
        ]
        if set(nodes) <= set(unreachable):
            raise NoNodeReachableError(f"no node of {self.fleet.path} can be reached", remedy=REPAIR)
        if self.overdue:
            raise DeadlineError(
                f"the deadline passed while {self.overdue}", remedy="raise --deadline, or examine fewer nodes"
            )
        if HOST_NAME in self.red:
            raise CsdctlError("the host is not fit to train", remedy=REPAIR)
        red = [name for name in nodes if name in self.red]
        if red and len(red) == len(nodes):
            raise CsdctlError(f"none of the {len(nodes)} nodes is fit to train", remedy=REPAIR)
        if FLEET_NAME in self.red:
            raise CsdctlError("the machines cannot train together", remedy=REPAIR)
        if red:
            raise PartialError(
                f"{len(red)} of {len(nodes)} nodes are not fit to train: {', '.join(red)}",
                remedy=f"{REPAIR}, or leave them out: --exclude {','.join(red)}",
            )

    def check_before_training(self) -> None:
        """Raise one error that lists all red checks; for a command that shows no table."""
        red = [check for check in self.checks if check.status == Status.FAIL]
        if len(red) == 1 and red[0].machine != FLEET_NAME:
            raise NodeError(describe(red[0]), node=red[0].machine, remedy=red[0].remedy)
        if red:
            listed = "\n".join(
                f"  {check.machine}: {describe(check)}" + (f"\n    → {check.remedy}" if check.remedy else "")
                for check in red
            )
            raise CsdctlError(
                f"the preflight found problems that would make the run fail:\n{listed}",
                remedy="fix them, leave nodes out with --exclude, or train anyway with --skip-doctor",
            )
        if self.overdue:
            raise DeadlineError(
                f"the preflight's deadline passed while {self.overdue}", remedy="--skip-doctor"
            )


def describe(check: Check) -> str:
    """Return a check in one line, without machine and remedy."""
    return f"{check.check}: {check.found}" + (f" (expected {check.expected})" if check.expected else "")
