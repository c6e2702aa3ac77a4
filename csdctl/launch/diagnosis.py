"""What mpirun's last words tell of the cause; pure.

mpirun names ranks by number and daemons by theirs; people know nodes. Its wording is that of Open MPI 5
(PRRTE 3); what is not recognized is shown as it is.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from csdctl.fleet.model import HOST_NAME
from csdctl.worker.protocol.events import Exited

_RANK = re.compile(r"process rank (\d+)")
_SIGNAL = re.compile(r"exited on signal (\d+)")
_DAEMON = re.compile(r"Remote daemon: *\[[^,\]]*,(\d+)\]")
_UNNAMED_DAEMON = re.compile(r"Daemon exit status: *(\d+)")
_BANNER = re.compile(r"^[-*=\s]*$")
MEMORY_REMEDY = "give it a smaller batch size: `csdctl tune --max-global-batch N`, or edit the plan"
_ENDED_BY_MPIRUN = (signal.SIGTERM, signal.SIGINT)
_NO_CAUSE = ("Abort is in progress", "Killed")
_NOISE = ("All log messages before absl", "oneDNN custom operations are on", "rebuild TensorFlow with")


@dataclass(frozen=True)
class Cause:
    """Which node, '' when it cannot be told, and what happened to it."""

    node: str
    message: str
    remedy: str = "look after the node and train again"


def is_noise(line: str) -> bool:
    """Whether `line` of a rank's output is only what TensorFlow says at every start."""
    return any(noise in line for noise in _NOISE)


def find_cause(words: Sequence[str], exited: Sequence[Exited], rank_nodes: Sequence[str]) -> Cause:
    """Why mpirun ended.

    `words` are its last lines, `exited` how ranks ended, the first one first; `rank_nodes` the machine of
    every rank, in order. mpirun numbers its daemons in the order in which it met the nodes, from 1; 0 is
    its own.
    """
    for one in exited:
        number = one.code - 128
        if number > 0 and number not in _ENDED_BY_MPIRUN:
            message = f"rank {one.rank} was killed by signal {number}"
            if number == signal.SIGKILL:
                return Cause(one.node, f"{message}, most likely out of memory", MEMORY_REMEDY)
            return Cause(one.node, message)
    text = "\n".join(words)
    remote = [node for node in rank_nodes if node != HOST_NAME]
    if found := _DAEMON.search(text):
        number = int(found[1])
        node = remote[number - 1] if 0 < number <= len(remote) else ""
        return Cause(node, "lost: its MPI daemon no longer answers (node down, link cut, or prted killed)")
    if found := _RANK.search(text):
        rank = int(found[1])
        node = rank_nodes[rank] if rank < len(rank_nodes) else ""
        if killed := _SIGNAL.search(text):
            return Cause(node, f"rank {rank} was ended by signal {killed[1]}")
        return Cause(node, f"rank {rank} was lost, or gave up because another one was")
    if found := _UNNAMED_DAEMON.search(text):
        return Cause("", f"the MPI daemon (prted) of a node (mpirun names none) ended with {found[1]}")
    lines = [line for line in words if not _BANNER.match(line) and not line.startswith(_NO_CAUSE)]
    return Cause("", lines[0] if lines else "it said nothing")
