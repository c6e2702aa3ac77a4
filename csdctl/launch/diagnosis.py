"""The cause of a failure, from what mpirun printed and how the ranks ended; pure.

mpirun identifies ranks and daemons by number; users know nodes. The patterns match the output of Open MPI 5
(PRRTE 3); unknown output is shown as it is.
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
_UNCONNECTED_DAEMON = re.compile(r"Remote host: *rank\d+-(\S+)")
_DAEMON_STATUS = re.compile(r"Daemon exit status: *(\d+)")
_BANNER = re.compile(r"^[-*=\s]*$")
MEMORY_REMEDY = "choose a smaller batch size: `csdctl tune --max-global-batch N`, or edit the plan"
_ENDED_BY_MPIRUN = (signal.SIGTERM, signal.SIGINT)
_NO_CAUSE = ("Abort is in progress", "Killed")
_NOISE = ("All log messages before absl", "oneDNN custom operations are on", "rebuild TensorFlow with")


@dataclass(frozen=True)
class Cause:
    """What happened to which node; `node` is '' when that is unknown."""

    node: str
    message: str
    remedy: str = "check the node and train again"


def is_noise(line: str) -> bool:
    """Return whether `line` is one of those that TensorFlow prints at every start."""
    return any(noise in line for noise in _NOISE)


def find_cause(stderr_tail: Sequence[str], exited: Sequence[Exited], rank_nodes: Sequence[str]) -> Cause:
    """Return why mpirun ended.

    `stderr_tail` are its last lines, `exited` the ranks that ended badly, in order of arrival; `rank_nodes`
    the machine of every rank. mpirun numbers its daemons from 1, in the order of the nodes in its command
    line; 0 is mpirun itself.
    """
    if killed := _find_killed_rank(exited):
        return killed
    text = "\n".join(stderr_tail)
    remote = [node for node in rank_nodes if node != HOST_NAME]
    if found := _DAEMON.search(text):
        number = int(found[1])
        node = remote[number - 1] if 0 < number <= len(remote) else ""
        return Cause(node, "lost: its MPI daemon no longer answers (node down, link cut, or prted killed)")
    if found := _RANK.search(text):
        rank = int(found[1])
        node = rank_nodes[rank] if rank < len(rank_nodes) else ""
        if by_signal := _SIGNAL.search(text):
            return Cause(node, f"rank {rank} was ended by signal {by_signal[1]}")
        return Cause(node, f"rank {rank} was lost, or exited because another rank was lost")
    if status := _DAEMON_STATUS.search(text):
        found = _UNCONNECTED_DAEMON.search(text)
        node = found[1] if found and found[1] in remote else ""
        whose = "its MPI daemon" if node else "the MPI daemon of a node that mpirun does not name"
        return Cause(node, f"{whose} (prted) did not connect to mpirun and exited with {status[1]}")
    lines = [line for line in stderr_tail if not _BANNER.match(line) and not line.startswith(_NO_CAUSE)]
    return Cause("", lines[0] if lines else "mpirun printed no message")


def _find_killed_rank(exited: Sequence[Exited]) -> Cause | None:
    """Return the first rank that was killed by a signal that mpirun did not send."""
    for event in exited:
        number = event.code - 128
        if number > 0 and number not in _ENDED_BY_MPIRUN:
            message = f"rank {event.rank} was killed by signal {number}"
            if number == signal.SIGKILL:
                return Cause(event.node, f"{message}, most likely out of memory", MEMORY_REMEDY)
            return Cause(event.node, message)
    return None
