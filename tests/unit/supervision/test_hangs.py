"""Ranks that hang, and ranks that are only slow."""

from collections.abc import Callable

import pytest

from csdctl.errors import DeadlineError
from csdctl.worker.protocol.events import Event, Progress
from csdctl.worker.protocol.orders import Ping
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedRank, orders_of


def test_slow_rank_that_answers_stays(fleet: Fleet) -> None:
    def finish_after_a_step(event: Event) -> None:
        if isinstance(event, Progress):
            fleet.finish()

    def wait(fleet: Fleet) -> None:
        fleet.rank(0).wait_for("csd1")
        fleet.rank(2).step()

    fleet.on_event = finish_after_a_step
    fleet.scripts[1] = wait
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]
    assert len(orders_of(fleet.rank(2), Ping)) == 1


def test_run_without_steps_fails_at_the_silence_deadline(fleet: Fleet) -> None:
    fleet.set_patience(silence_s=scaled(0.6))
    error = fleet.run_to_error(DeadlineError)
    assert "no rank has completed a step for too long" in error.message
    assert "logs:" in error.remedy


def test_rank_that_answers_but_sends_the_others_nothing_is_left_out_at_the_deadline(fleet: Fleet) -> None:
    def send_nothing(fleet: Fleet) -> None:
        fleet.rank(0).wait_for("csd1")
        fleet.rank(2).step()  # says that it makes progress; rank 0 has seen nothing of it

    fleet.set_patience(silence_s=scaled(0.6))
    fleet.scripts = {1: send_nothing, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 1)]
    assert "has sent the other ranks nothing" in fleet.lost_messages()[0]


def test_run_in_which_rank_0_waits_for_all_others_fails_at_the_deadline(fleet: Fleet) -> None:
    fleet.set_patience(silence_s=scaled(0.6))
    fleet.scripts[1] = lambda fleet: fleet.rank(0).wait_for("csd0", "csd1")
    assert "no rank has completed a step" in fleet.run_to_error(DeadlineError).message


@pytest.mark.parametrize("stop", [ScriptedRank.finish, ScriptedRank.pause])
def test_rank_that_hangs_after_others_have_finished_or_paused_is_lost(
    fleet: Fleet, stop: Callable[[ScriptedRank], None]
) -> None:
    def hang_at_the_end(fleet: Fleet) -> None:
        fleet.rank(1).is_hung = True
        stop(fleet.rank(0))
        stop(fleet.rank(2))

    fleet.scripts[1] = hang_at_the_end
    fleet.scripts[2] = Fleet.finish
    if stop is ScriptedRank.finish:
        assert fleet.run_to_error().node == "csd0"
    else:
        fleet.run()
        assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert "is stopped, or its machine hangs" in fleet.lost_messages()[0]
