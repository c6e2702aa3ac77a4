"""Causes of a failure, from output of Open MPI 5 (shortened)."""

import pytest

from csdctl.launch.mpi_job import find_cause
from csdctl.worker.protocol.events import Exited

NODES = ["host", "csd0", "csd1"]
LOST_DAEMON = """\
--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-storage-4711@0,0] on node storage
  Remote daemon: [prterun-storage-4711@0,2] on node csd1

This is usually due to either a failure of the TCP network
--------------------------------------------------------------------------
""".splitlines()


SIGNALLED = ["prterun noticed that process rank 1 with PID 0 on node csd0 exited on signal 11."]


@pytest.mark.parametrize(
    ("printed", "exited", "nodes", "node", "message"),
    [
        (LOST_DAEMON, [Exited(2, "csd1", 137), Exited(0, "host", 1)], NODES, "csd1", "likely out of memory"),
        ([], [Exited(0, "host", 128 + 15), Exited(1, "csd0", 139)], NODES, "csd0", "killed by signal 11"),
        (LOST_DAEMON, [], NODES, "csd1", "lost"),
        (LOST_DAEMON, [], ["csd7", "host", "csd8"], "csd8", "lost"),
        (SIGNALLED, [], NODES, "csd0", "signal 11"),
    ],
    ids=["killed first", "mpirun ended the other", "daemon", "host between the nodes", "signal"],
)
def test_node_that_was_lost_first_is_the_cause(
    printed: list[str], exited: list[Exited], nodes: list[str], node: str, message: str
) -> None:
    cause = find_cause(printed, exited, nodes)
    assert cause.node == node
    assert message in cause.message


@pytest.mark.parametrize("number", [3, 99])
def test_unknown_rank_or_daemon_number_names_no_node(number: int) -> None:
    assert find_cause([f"process rank {number} exited"], [], NODES).node == ""
    assert find_cause([f"Remote daemon: [prterun-x@0,{number}] on node y"], [], NODES).node == ""


def test_daemon_that_never_connected_is_named_by_its_node() -> None:
    printed = ["A daemon failed to report back after being spawned. This could", "  Local host:    vm"]
    printed += ["  Remote host:   rank2-csd1", "  Daemon exit status: 213"]
    cause = find_cause(printed, [], NODES)
    assert cause.node == "csd1"
    assert "did not connect to mpirun and exited with 213" in cause.message
    assert find_cause([line.replace("csd1", "other") for line in printed], [], NODES).node == ""
