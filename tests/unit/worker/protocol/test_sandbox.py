"""The users of sandboxes."""

from csdctl.standalone import leftovers
from csdctl.worker.protocol.json_codec import MAX_RANKS
from csdctl.worker.protocol.sandbox import FIRST_USER, NUM_RUNS, user_of_link


def test_every_link_of_two_runs_has_a_user_of_its_own_that_no_account_has() -> None:
    ranks = (0, 1, MAX_RANKS - 1)
    users = [user_of_link(run_id, rank) for run_id in ("20261129-005452-257293", "run") for rank in ranks]
    assert len(set(users)) == len(users)
    assert all(FIRST_USER <= user < 1 << 31 for user in users)


def test_leftovers_of_every_link_are_found_as_those_of_a_sandbox() -> None:
    last = FIRST_USER + NUM_RUNS * MAX_RANKS - 1
    assert range(FIRST_USER, last + 1) == leftovers.SANDBOX_USERS
    assert user_of_link("20261129-005452-257293", MAX_RANKS - 1) in leftovers.SANDBOX_USERS
