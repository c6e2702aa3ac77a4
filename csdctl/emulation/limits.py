"""Which of the two ways holds a node to its share of the CPU: control groups or the duty cycle."""

import os
from typing import Protocol

from csdctl.emulation.cgroups import open_cgroup
from csdctl.emulation.duty import DutyCycle
from csdctl.errors import InputError


class CpuLimit(Protocol):
    """Holds the processes of one node to a share of the CPU."""

    mechanism: str

    def build_command(self, command: list[str]) -> list[str]:
        """The argument list that runs `command` under the limit."""

    def close(self) -> None:
        """Take the limit away; nothing stays stopped."""


def cgroup_prefix(fleet_id: str) -> str:
    """What the control groups of a fleet's nodes start with."""
    return f"csdctl-{fleet_id}-"


def open_cpu_limit(mechanism: str, fleet_id: str, node: str, cpu: float) -> CpuLimit:
    """Hold the descendants of this process to `cpu` cores.

    `mechanism` is "cgroup", "duty" or "auto" (control groups where they are writable). Raises
    InputError when "cgroup" is asked for and none can be made.
    """
    if mechanism in ("auto", "cgroup"):
        cgroup = open_cgroup(cgroup_prefix(fleet_id) + node, cpu)
        if cgroup:
            return cgroup
        if mechanism == "cgroup":
            raise InputError(
                "no control group with a CPU share can be made here",
                remedy="use --cpu-mechanism duty",
                node=node,
            )
    return DutyCycle(os.getpid(), cpu)
