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


def test_rank_that_was_killed_first_is_the_cause() -> None:
    cause = find_cause(LOST_DAEMON, [Exited(2, "csd1", 137), Exited(0, "host", 1)], NODES)
    assert cause.node == "csd1"
    assert "rank 2 was killed by signal 9, most likely out of memory" in cause.message


def test_rank_that_mpirun_itself_ended_is_not_the_cause() -> None:
    exited = [Exited(0, "host", 128 + 15), Exited(1, "csd0", 139)]
    assert find_cause([], exited, NODES).node == "csd0"


def test_lost_daemon_is_named_by_its_node() -> None:
    cause = find_cause(LOST_DAEMON, [], NODES)
    assert cause.node == "csd1"
    assert "lost" in cause.message


def test_host_between_the_nodes_does_not_shift_the_daemon_numbers() -> None:
    assert find_cause(LOST_DAEMON, [], ["csd7", "host", "csd8"]).node == "csd8"


def test_rank_ended_by_a_signal_is_named_by_its_node() -> None:
    printed = ["prterun noticed that process rank 1 with PID 0 on node csd0 exited on signal 11."]
    cause = find_cause(printed, [], NODES)
    assert cause.node == "csd0"
    assert "signal 11" in cause.message


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
