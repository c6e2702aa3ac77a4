"""Choose the CPU limit of a node: control groups or the duty cycle."""

import os
from typing import Protocol

from csdctl.emulation.cgroups import open_cgroup
from csdctl.emulation.duty import DutyCycle
from csdctl.errors import InputError


class CpuLimit(Protocol):
    """Limits the processes of one node to a share of the CPU."""

    mechanism: str

    def build_command(self, command: list[str]) -> list[str]:
        """Return the argument list that runs `command` under the limit."""

    def close(self) -> None:
        """Remove the limit and continue all stopped processes."""


def cgroup_prefix(fleet_id: str) -> str:
    """Return the prefix of the control groups of a fleet."""
    return f"csdctl-{fleet_id}-"


def open_cpu_limit(mechanism: str, fleet_id: str, node: str, cpu: float) -> CpuLimit:
    """Limit the descendants of this process to `cpu` cores.

    `mechanism` is "cgroup", "duty" or "auto" (control groups if they are writable). Raises InputError when
    "cgroup" is requested and no group can be created.
    """
    if mechanism in ("auto", "cgroup"):
        cgroup = open_cgroup(cgroup_prefix(fleet_id) + node, cpu)
        if cgroup:
            return cgroup
        if mechanism == "cgroup":
            raise InputError(
                "no control group with a CPU limit can be created on this machine",
                remedy="use --cpu-mechanism duty",
                node=node,
            )
    return DutyCycle(os.getpid(), cpu)
