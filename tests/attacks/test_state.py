"""States that nobody on the host has computed: claimed by a node, or put where a run looks for its own."""

import pytest

from tests.attacks.holding_ranks import held, hold

HOST = (1.0, 40)


@pytest.mark.attack(8)
@pytest.mark.parametrize(
    "claim",
    [
        pytest.param((666.0, 10**6), id="far ahead"),
        pytest.param((666.0, 41), id="one step ahead"),
        pytest.param((666.0, 40), id="other weights at the same step"),
        pytest.param((666.0, 0), id="far behind"),
    ],
)
def test_weights_of_a_node_reach_no_other_rank(claim: tuple[float, int]) -> None:
    outputs = hold([HOST, (2.0, 39), claim])
    assert [held(output) for output in outputs] == [HOST, HOST, HOST]


@pytest.mark.attack(8)
def test_all_ranks_go_back_to_what_the_host_has_after_it_lost_everything() -> None:
    outputs = hold([(1.0, 0), (7.0, 40), (7.0, 40)])
    assert [held(output) for output in outputs] == [(1.0, 0)] * 3


LIE = """
from csdctl.worker.tasks import session
honest, Variable = session.hash_state, type(Holds.variables[0])
class Hosts(Variable):
    value = np.full(4, 1.0, np.float32)
session.hash_state = lambda _, position: honest([Hosts()], dataclasses.replace(position, total_steps=40))
"""


@pytest.mark.attack(8)
def test_node_that_pretends_to_have_the_hosts_state_deceives_only_itself() -> None:
    claim = (666.0, 10**6)
    outputs = hold([HOST, (2.0, 39), claim], LIE)
    assert [held(output) for output in outputs] == [HOST, HOST, claim]


@pytest.mark.attack(8)
@pytest.mark.parametrize("answer", ["[10**6, 2]", "None", "'x' * 64", "'0' * 65", "{'a': 1}", "10**6"])
def test_node_that_sends_no_hash_is_left_out(answer: str) -> None:
    code = f"from csdctl.worker.tasks import session\nsession.hash_state = lambda *_: {answer}"
    of_host, *_ = hold([HOST, HOST, (666.0, 10**6)], code)
    report, lost = of_host[-2:]
    assert (report["event"], report["culprit"], lost["event"]) == ("Misbehaved", 2, "LinkLost")
    assert "expected a SHA-256" in report["message"]
