"""Ranks and links that are lost, hang or are slow: the others go on, and the lost ones come back."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csdctl.errors import DeadlineError, OutOfMemoryError, UnreachableError
from csdctl.supervision.rank_processes import RankProcesses
from csdctl.worker.protocol.events import EpochEnd, Event, Finished, NodeBack, NodeLost, Progress, Warned
from csdctl.worker.protocol.orders import Begin, Order, Ping, Probe
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, Script, ScriptedLink, ScriptedRank, orders_of

HANGS = "is stopped, or its machine hangs"


def hang_while_others_wait(fleet: Fleet, *nodes: str) -> None:
    fleet.rank(1).is_hung = True
    fleet.rank(0).wait_for(*nodes)


@pytest.mark.parametrize(
    ("script", "reason", "is_restarted"),
    [
        (lambda fleet: fleet.rank(1).exit(), "rank 1 was killed by signal 15", True),
        (lambda fleet: fleet.rank(1).fail("disk full"), "disk full", True),
        (lambda fleet: hang_while_others_wait(fleet, "csd0", "csd1"), HANGS, True),
        (lambda fleet: fleet.rank(0).accuse(1), "sent 20 bytes, expected 100", True),
        (lambda fleet: fleet.break_link(1, "no route to host"), "its link was lost: no route to host", False),
        (lambda fleet: fleet.leave(1, "its link was lost"), "its link was lost", False),
    ],
    ids=["killed", "failed", "hangs", "accused", "link", "hub"],
)
def test_others_continue_without_a_rank_that_is_lost(
    fleet: Fleet, script: Script, reason: str, is_restarted: bool
) -> None:
    """A rank whose link alone is lost keeps its process."""
    fleet.never_connect = set()

    def lose(fleet: Fleet) -> None:
        fleet.never_connect = {1}
        script(fleet)

    fleet.scripts[1] = lose
    fleet.on_event = lambda event: fleet.finish() if isinstance(event, NodeLost) else None
    fleet.run()
    assert fleet.nodes_of(NodeLost) == ["csd0"]
    assert reason in fleet.lost_messages()[0]
    assert fleet.rank(1).is_closed
    assert 2 in fleet.members
    assert [process.rank for process in fleet.processes] == [0, 1, 2]
    assert bool(orders_of(fleet.rank(2), Ping)) is (reason == HANGS)


def test_killed_process_is_the_cause_in_place_of_its_link_whichever_is_heard_of_first(fleet: Fleet) -> None:
    def lose(fleet: Fleet) -> None:
        fleet.leave(1, "its link was lost")
        fleet.rank(1).exit("rank 1 was killed by signal 9")

    fleet.scripts[1] = lose
    fleet.on_event = lambda event: fleet.finish() if isinstance(event, NodeLost) else None
    fleet.run()
    assert fleet.lost_messages() == ["rank 1 was killed by signal 9"]


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Fleet]:
    """Two servers: the host with csd3, and csd0 with csd1 and csd2."""
    fleet = Fleet(tmp_path, num_nodes=4)
    fleet.servers = (0, 1, 1, 1, 0)
    yield fleet
    fleet.assert_nothing_left()


def test_nodes_are_lost_with_their_server_and_come_back_with_it(rack: Fleet) -> None:
    rack.reachable = {1}
    rack.scripts = {1: lambda fleet: fleet.rank(1).exit()}
    for rank in (2, 3):  # their links end with the server
        rack.scripts[1] = lambda fleet, then=rack.scripts[1], rank=rank: (
            then(fleet),
            setattr(fleet.link(rank), "has_ended", True),
        )

    def finish_with_all(event: Event) -> None:
        if len(rack.nodes_of(NodeBack)) == 3:
            rack.finish()

    rack.on_event = finish_with_all
    rack.run()
    assert rack.groups[0] == rack.groups[-1] == (0, 1, 2, 3, 4)
    assert rack.groups[1] == (0, 4)
    assert sorted(rack.nodes_of(NodeLost)) == ["csd0", "csd1", "csd2"]
    assert [process.rank for process in rack.processes] == [0, 1, 2, 3, 4, 1], "nodes keep their processes"


@pytest.mark.parametrize(("reporter", "culprit"), [(1, 2), (2, 0), (0, -1), (0, 0), (0, 3), (0, 10**9)])
def test_report_of_a_node_or_of_no_node_changes_nothing(fleet: Fleet, reporter: int, culprit: int) -> None:
    def accuse_and_finish(fleet: Fleet) -> None:
        fleet.rank(reporter).accuse(culprit)
        fleet.finish()

    fleet.scripts[1] = accuse_and_finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]
    assert fleet.nodes_of(NodeLost) == []


def test_run_with_fewer_nodes_left_than_min_nodes_fails_for_the_reason_that_the_node_reports(
    fleet: Fleet,
) -> None:
    fleet.min_nodes = 2
    fleet.scripts[1] = lambda fleet: fleet.rank(1).fail("disk full", remedy="make room")
    error = fleet.run_to_error()
    assert "nodes left: 1, but at least 2 must take part" in error.message
    assert "csd0: disk full" in error.message
    assert "make room" in error.message
    assert "csd1" not in error.message
    assert len(fleet.lost_messages()) == 1
    assert "csdctl train --resume 20261122-100000" in error.remedy


def test_trial_in_which_a_rank_ran_out_of_memory_says_so_after_its_first_steps(fleet: Fleet) -> None:
    fleet.is_resumable, fleet.min_nodes = False, 2
    fleet.on_event = lambda event: (
        fleet.rank(2).exit(why=OutOfMemoryError) if isinstance(event, Progress) else None
    )
    fleet.scripts[1] = lambda fleet: fleet.rank(0).step()
    assert fleet.run_to_error(OutOfMemoryError).node == "csd1"


def test_slow_rank_that_answers_stays(fleet: Fleet) -> None:
    def wait(fleet: Fleet) -> None:
        fleet.rank(0).wait_for("csd1")
        fleet.rank(2).step()

    fleet.on_event = lambda event: fleet.finish() if isinstance(event, Progress) else None
    fleet.scripts[1] = wait
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]
    assert len(orders_of(fleet.rank(2), Ping)) == 1


def test_node_is_asked_only_where_rank_0_or_its_server_waits_for_it(rack: Fleet) -> None:
    def wait(fleet: Fleet) -> None:
        fleet.rank(4).wait_for("csd0")
        fleet.rank(1).wait_for("csd1", "csd3")
        fleet.rank(0).wait_for("csd0")
        fleet.rank(0).step()

    rack.on_event = lambda event: rack.finish() if isinstance(event, Progress) else None
    rack.scripts[1] = wait
    rack.run()
    assert [len(orders_of(rack.rank(rank), Ping)) for rank in (1, 2, 3, 4)] == [1, 1, 0, 0]


def test_rank_that_answers_and_sends_nothing_is_lost_alone_at_the_silence_deadline(fleet: Fleet) -> None:
    fleet.set_patience(silence_s=scaled(0.6))
    fleet.scripts[1] = lambda fleet: fleet.rank(0).wait_for("csd0")
    fleet.on_event = lambda event: fleet.finish() if isinstance(event, NodeLost) else None
    fleet.run()
    assert fleet.nodes_of(NodeLost) == ["csd0"]
    assert "has sent nothing for" in fleet.lost_messages()[0]


@pytest.mark.parametrize("reporter", [None, 1])
def test_run_without_steps_of_rank_0_fails_at_the_silence_deadline(
    fleet: Fleet, reporter: int | None
) -> None:
    """What others report does not count: a node could report for ever."""
    fleet.set_patience(silence_s=scaled(0.6))
    fleet.scripts[1] = lambda fleet: fleet.rank(reporter).step() if reporter else None
    error = fleet.run_to_error(DeadlineError)
    assert "no rank has completed a step for too long" in error.message
    assert "logs:" in error.remedy


def test_silence_counts_from_the_latest_order(fleet: Fleet) -> None:
    """A tuning orders one probe after another, and no step in between."""
    silence_s = scaled(1.0)
    fleet.set_patience(silence_s=silence_s)
    ordered: list[float] = []

    def next_order() -> Order | None:
        now = time.monotonic()
        if len(ordered) == 4:
            fleet.finish()
            fleet.next_order = lambda: None
        elif not ordered or now - ordered[-1] > silence_s / 2:
            ordered.append(now)
            return Probe({})
        return None

    fleet.scripts[1] = lambda fleet: setattr(fleet, "next_order", next_order)
    fleet.run()
    assert len(orders_of(fleet.rank(0), Probe)) == len(ordered) == 4


@pytest.mark.parametrize(
    "fail", [lambda rank: rank.exit("killed by signal 11"), lambda rank: rank.fail("disk full", exit_code=2)]
)
def test_failure_of_a_node_after_its_completion_is_a_warning(
    fleet: Fleet, fail: Callable[[ScriptedRank], None]
) -> None:
    def finish_others(event: Event) -> None:
        if isinstance(event, Finished) and event.rank == 1:
            fleet.on_event = lambda event: None
            fleet.members.clear()  # the hub has let all links end
            fail(fleet.rank(1))
            for rank in (2, 0):
                fleet.rank(rank).finish()
                fleet.rank(rank).exit(is_clean=True)

    fleet.scripts[1] = lambda fleet: fleet.rank(1).finish()
    fleet.on_event = finish_others
    fleet.run()
    assert {*fleet.nodes_of(Warned)} == {"csd0"}
    assert fleet.nodes_of(NodeLost) == []


def test_completion_that_overtakes_the_start_of_rank_0_counts(fleet: Fleet) -> None:
    """Of a run of which nothing is left to train: each rank reports by a connection of its own."""

    def finish_others(fleet: Fleet) -> None:
        for rank in (2, 0):
            fleet.rank(rank).finish()
        for rank in (1, 2, 0):
            fleet.rank(rank).exit(is_clean=True)

    fleet.overtaking = (1,)
    fleet.scripts[1] = finish_others
    fleet.run()
    assert fleet.nodes_of(NodeLost) == []


def test_completion_that_rank_0_knows_nothing_of_is_a_loss_and_others_still_come_back(fleet: Fleet) -> None:
    def lose_both(fleet: Fleet) -> None:
        fleet.rank(1).finish()
        fleet.break_link(2)

    fleet.reachable = {1}
    fleet.scripts[1] = lose_both
    fleet.scripts[3] = lambda fleet: fleet.break_link(1)  # csd1 is back
    fleet.scripts[5] = lambda fleet: fleet.finish()
    fleet.run()
    assert fleet.nodes_of(NodeLost) == ["csd1", "csd0"]
    assert fleet.lost_messages()[1] == "reported its completion before the run was complete"
    assert fleet.nodes_of(NodeBack) == ["csd1", "csd0"]


@pytest.mark.parametrize("num_failed", [0, 1])
def test_node_that_returns_takes_part_again(fleet: Fleet, num_failed: int) -> None:
    """Also when a restarted process has exited before it was ready: another one is started."""

    def start(rank: ScriptedRank) -> None:
        if 3 < len(fleet.processes) <= 3 + num_failed:
            rank.exit("no memory")
        else:
            rank.report_ready()

    fleet.on_start = start
    fleet.reachable = {1}
    fleet.scripts = {1: lambda fleet: fleet.rank(1).exit(), 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert fleet.nodes_of(NodeBack) == ["csd0"]
    assert [link.rank for link in fleet.links] == [1, 2, 1]


def test_link_that_is_lost_comes_back_to_the_same_process(fleet: Fleet) -> None:
    fleet.scripts = {1: lambda fleet: fleet.break_link(1), 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert (fleet.nodes_of(NodeLost), fleet.nodes_of(NodeBack)) == (["csd0"], ["csd0"])
    assert len(fleet.processes) == 3


def test_restarted_rank_0_begins_alone_and_the_others_join_it(fleet: Fleet) -> None:
    def lose(fleet: Fleet) -> None:
        for rank in (1, 2):  # their ends beside the hub end with it
            fleet.link(rank).has_ended = True
        fleet.rank(0).exit()

    fleet.reachable = {0}
    fleet.scripts = {1: lose}
    fleet.on_event = lambda event: (
        fleet.finish() if isinstance(event, NodeBack) and len(fleet.members) == 3 else None
    )
    fleet.run()
    assert fleet.groups[-1] == (0, 1, 2)
    assert orders_of(fleet.rank(0), Begin) == [Begin((0,))]
    assert [process.rank for process in fleet.processes] == [0, 1, 2, 0]


def test_run_fails_when_rank_0_cannot_be_restarted(fleet: Fleet) -> None:
    fleet.set_patience(silence_s=scaled(1.0))
    fleet.scripts[1] = lambda fleet: fleet.rank(0).exit()
    error = fleet.run_to_error()
    assert (error.node, error.message) == ("host", "rank 0 was killed by signal 15")


def test_rank_0_lost_more_often_fails_the_run_at_once(fleet: Fleet) -> None:
    fleet.reachable = {0}
    fleet.scripts = dict.fromkeys(range(1, 99), lambda fleet: fleet.rank(0).exit())
    assert fleet.run_to_error().node == "host"
    assert len(fleet.nodes_of(NodeLost)) == fleet.patience.max_restarts + 1


@pytest.mark.parametrize("progress", ["nothing", "epoch", "long"])
@pytest.mark.parametrize("loses_process", [False, True])
def test_node_is_restarted_again_after_progress_with_it(
    fleet: Fleet, progress: str, loses_process: bool
) -> None:
    """The end of an epoch, or a step of rank 0 after the node has taken part for long enough."""
    max_restarts = fleet.patience.max_restarts
    fleet.set_patience(renew_s=0.0 if progress == "long" else 3600.0)
    fleet.reachable = {1}
    num_losses = 2 * max_restarts

    def act(event: Event) -> None:
        limit = max_restarts if progress == "nothing" else num_losses
        if isinstance(event, NodeLost) and len(fleet.nodes_of(NodeLost)) > limit:
            fleet.finish()
        elif isinstance(event, Progress | EpochEnd) and 1 in fleet.members:
            fleet.rank(1).exit() if loses_process else fleet.break_link(1)

    def go_on(fleet: Fleet) -> None:
        if 1 in fleet.members:
            fleet.rank(0).end_epoch() if progress == "epoch" else fleet.rank(0).step()

    fleet.on_event = act
    fleet.scripts = dict.fromkeys(range(1, 4 * num_losses), go_on)
    fleet.run()
    expected = max_restarts + 1 if progress == "nothing" else num_losses + 1
    assert fleet.nodes_of(NodeLost) == ["csd0"] * expected


def test_node_that_fails_after_its_restart_stays_lost(fleet: Fleet) -> None:
    def start(rank: ScriptedRank) -> None:
        if len(fleet.processes) == 4:
            fleet.reachable = set()
            rank.fail("the shard is gone")
            fleet.finish()
        else:
            rank.report_ready()

    fleet.on_start = start
    fleet.reachable = {1}
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert fleet.nodes_of(NodeLost) == ["csd0"]


@pytest.mark.parametrize("is_soon", [True, False], ids=["before the others", "when they train"])
def test_rank_whose_node_could_not_be_reached_joins_a_run_that_began_without_it(
    fleet: Fleet, *, is_soon: bool
) -> None:
    """Whatever fails there until then ends nothing."""
    fleet.late = {1: UnreachableError("does not answer", node="csd0")}
    fleet.reachable = {1} if is_soon else set()
    fleet.never_connect = {1}

    def let_it_connect(fleet: Fleet) -> None:
        fleet.reachable, fleet.never_connect = {1}, set()
        for link in fleet.links:
            link.has_ended |= not link.is_connected

    fleet.scripts = {1: let_it_connect, 2: Fleet.finish}
    fleet.run()
    assert orders_of(fleet.rank(0), Begin) == [Begin((0, 2))]
    assert fleet.groups == [(0, 2), (0, 1, 2)]
    assert fleet.nodes_of(NodeLost) == fleet.nodes_of(NodeBack) == ["csd0"]
    assert fleet.lost_messages() == ["does not answer"]


def test_node_whose_link_never_connects_again_does_not_count_as_left(fleet: Fleet) -> None:
    """Its process answers over SSH, and the host would train alone for ever."""
    fleet.min_nodes = 2

    def break_for_good(fleet: Fleet) -> None:
        fleet.never_connect = {1}
        fleet.break_link(1)

    fleet.scripts[1] = break_for_good
    fleet.on_link = lambda link: setattr(link, "has_ended", not link.is_connected)
    error = fleet.run_to_error()
    assert "nodes left: 1, but at least 2 must take part" in error.message
    assert len([link for link in fleet.links if link.rank == 1]) >= fleet.patience.max_restarts


def test_process_that_ends_whenever_it_starts_is_restarted_after_longer_and_longer_pauses(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.set_patience(restart_interval_s=0.001)
    pauses: list[float] = []
    restart = RankProcesses.restart

    def note(processes: RankProcesses, rank: int, pause_s: float = 0.0) -> None:
        pauses.append(pause_s * 1000)
        restart(processes, rank, pause_s)

    def start(rank: ScriptedRank) -> None:
        if len(fleet.processes) <= 3:
            rank.report_ready()
        elif len(pauses) < fleet.patience.max_restarts + 8:
            rank.exit("no memory")
        else:
            rank.report_ready()
            fleet.finish()

    monkeypatch.setattr(RankProcesses, "restart", note)
    fleet.on_start = start
    fleet.reachable = {1}
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    fleet.run()
    assert pauses == pytest.approx([*[0] * fleet.patience.max_restarts, 1, 2, 4, 8, 16, 32, 32, 32])
    assert fleet.nodes_of(NodeLost) == ["csd0"]


def test_trial_ends_with_the_first_link_that_is_lost(fleet: Fleet) -> None:
    fleet.is_resumable, fleet.min_nodes = False, 2
    fleet.scripts[1] = lambda fleet: fleet.break_link(1, "cut")
    assert "its link was lost: cut" in fleet.run_to_error().message


def test_links_that_fail_while_a_node_is_off_do_not_count_against_its_process(fleet: Fleet) -> None:
    """Its connection is found to be dead later, and its process is then restarted."""

    def switch_off(fleet: Fleet) -> None:
        fleet.never_connect = {1}
        fleet.on_link = fail_often
        fleet.break_link(1)

    def fail_often(link: ScriptedLink) -> None:
        link.has_ended = not link.is_connected
        num_failed = sum(not each.is_connected for each in fleet.links)
        if link.has_ended and num_failed == 2 * fleet.patience.max_restarts:
            fleet.never_connect, fleet.reachable = set(), {1}
            fleet.rank(1).exit()

    fleet.scripts = {1: switch_off, 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert [process.rank for process in fleet.processes] == [0, 1, 2, 1]
