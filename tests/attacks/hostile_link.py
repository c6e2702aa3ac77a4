"""Programs in the place of one node's link. Each is csdctl's own, changed in what it sends over MPI."""

HEAD = """
import json, math, os, socket, struct, sys, time
import numpy as np
import csdctl.worker.group.collective as collective
import csdctl.worker.group.link as link
run, rank = sys.argv[1], int(sys.argv[2])
"""
SERVE = """
link.serve_link(run, rank, 1)
"""
RUN_COMMAND = """
class Command(bytes):
    def __reduce__(self):
        return os.system, ("echo ran >> {marker}",)
"""
"""Bytes whose pickle runs a command where it is loaded."""


def sends_value(content: str) -> str:
    """Return a link that sends the bytes `content`, an expression, as its rank's value."""
    return f"""{HEAD}
honest = link.allgather
link.allgather = lambda world, _, **options: honest(world, {content}, 1 << 40, **options)
{SERVE}"""


def sends_messages(code: str) -> str:
    """Return a link whose part of a gathering is `code`, which has MPI's own `comm`."""
    return f"""{HEAD}
from csdctl.worker.group import messages as tags
def gather(world, *_, **__):
    comm = world._communicator
    {code.strip().replace(chr(10), chr(10) + "    ")}
    time.sleep(3600)
link.allgather = gather
{SERVE}"""


def sends_vector(code: str) -> str:
    """Return a link that changes its vector by `code` before it is summed, or sends something else."""
    return f"""{HEAD}
class Hostile(collective.Star):
    num_taken = -3  # while a collective is chosen
    def sum(self, on_wait, expected=None):
        self.num_taken += 1
        if self.num_taken <= 0:
            return super().sum(on_wait)
        vector, comm = np.frombuffer(self._local, np.float32), self._world._communicator
        {code.strip().replace(chr(10), chr(10) + "        ")}
        super().sum(on_wait, expected)
collective.COLLECTIVES["star"] = Hostile
{SERVE}"""
