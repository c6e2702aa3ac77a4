"""mpirun exits while the ranks are still alive."""

import pytest

from csdctl.worker.protocol.events import NodeBack, NodeLost
from tests.unit.supervision.scripted_ranks import Fleet, shell


def mpirun_blaming(rank: int, node: str) -> list[str]:
    """Return the command of an mpirun that fails and names the rank of its group that was killed."""
    message = (
        f"prterun noticed that process rank {rank} with PID 7 on node {node} exited on signal 9 (Killed)."
    )
    return shell(f"echo '{message}' >&2; exit 1")


@pytest.mark.parametrize("exit_code", [0, 1])
def test_mpirun_that_exits_is_started_again(fleet: Fleet, exit_code: int) -> None:
    fleet.mpirun[1] = shell(f"exit {exit_code}")
    fleet.scripts[2] = Fleet.finish
    fleet.run()
    assert fleet.groups == fleet.linked == [(0, 1, 2)] * 2


def test_run_fails_after_too_many_failed_groups_in_a_row(fleet: Fleet) -> None:
    fleet.mpirun = dict.fromkeys(range(1, 9), shell("echo no route >&2; exit 1"))
    error = fleet.run_to_error()
    assert "no route" in error.message
    assert len(fleet.groups) == 1 + fleet.patience.max_attempts


def test_step_resets_the_count_of_failed_groups(fleet: Fleet) -> None:
    def step_and_break(fleet: Fleet) -> None:
        fleet.rank(0).step()
        fleet.rank(0).lose_link(len(fleet.groups))

    fleet.scripts = dict.fromkeys(range(1, 6), step_and_break)
    fleet.scripts[6] = Fleet.finish
    fleet.run()
    assert len(fleet.groups) == 6


def test_node_that_mpirun_blames_repeatedly_is_left_out(fleet: Fleet) -> None:
    fleet.mpirun = dict.fromkeys((1, 2, 3), mpirun_blaming(1, "csd0"))
    fleet.scripts[4] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * 3 + [(0, 2)]
    assert fleet.nodes_of(NodeLost) == ["csd0"]


def test_failed_run_does_not_blame_a_node_lost_long_ago(fleet: Fleet) -> None:
    fleet.lose_rank_1_early()
    fleet.scripts[2] = lambda fleet: fleet.rank(0).step()
    fleet.mpirun = dict.fromkeys(range(2, 9), shell("echo no route >&2; exit 1"))
    error = fleet.run_to_error()
    assert "no route" in error.message
    assert error.node == ""


def test_restarting_rank_is_not_dropped_for_its_earlier_loss(fleet: Fleet) -> None:
    def lose_link(fleet: Fleet) -> None:
        fleet.rank(0).lose_link(len(fleet.groups))

    fleet.on_start = lambda rank: rank.report_ready() if len(fleet.processes) <= 3 else None
    fleet.reachable = {1}
    fleet.may_restart = lambda rank: True
    fleet.scripts = dict.fromkeys(range(1, fleet.patience.max_attempts), lose_link)
    fleet.scripts[fleet.patience.max_attempts] = lambda fleet: fleet.rank(1).exit()
    fleet.scripts[fleet.patience.max_attempts + 1] = Fleet.finish
    fleet.run()
    assert len(fleet.processes) == 4
    assert fleet.nodes_of(NodeLost) == ["csd0"]


def test_host_that_mpirun_blames_repeatedly_is_restarted(fleet: Fleet) -> None:
    fleet.mpirun = dict.fromkeys((1, 2, 3), mpirun_blaming(0, "host"))
    fleet.reachable = {0}
    fleet.scripts[4] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * 4
    assert fleet.nodes_of(NodeBack) == ["host"]
