"""What each message of a rank leads to in each phase of a run: all phases, all messages."""

import pytest

from csdctl.errors import CsdctlError, NodeError
from csdctl.supervision.rank_processes import ProcessEnded, RankMessage
from csdctl.supervision.supervisor import ACTIONS, Phase, Supervisor
from csdctl.worker.protocol.events import (
    EVENTS,
    EpochEnd,
    Evaluating,
    Failed,
    Finished,
    Joined,
    LinkLost,
    Misbehaved,
    NodeBack,
    NodeLost,
    Paused,
    Pong,
    Progress,
    Ready,
    WaitingFor,
)
from tests.unit.supervision.scripted_ranks import Fleet

END, LOSS, REGROUP, BACK, NOTHING = "ends the run", "rank lost", "next group", "rank is back", "nothing"
EXIT = ProcessEnded(1, "csd0", NodeError("killed", node="csd0"))
SIZES = {"0": 8, "1": 8, "2": 8}
MESSAGES: dict[type[RankMessage], RankMessage] = {
    ProcessEnded: EXIT,
    Failed: Failed(1, "csd0", "disk full", "", 1),
    Ready: Ready(1, "csd0", 100),
    Joined: Joined(1, "csd0", 1, 1, 0, 10, 0, SIZES, "star", 0.001),
    LinkLost: LinkLost(1, "csd0", 1, 1, 3),
    Progress: Progress(1, "csd0", 1, 1, 1, 8, 0.1, 0.1, 0.2),
    EpochEnd: EpochEnd(1, "csd0", 1, 10, 80, 1.0, 0.1, 1.1, "hash"),
    WaitingFor: WaitingFor(1, "csd0", ("csd1",)),
    Misbehaved: Misbehaved(0, "host", 1, "sent what no rank may send"),
    Paused: Paused(1, "csd0", 1),
    Finished: Finished(1, "csd0", 1, 10, "hash", 1 << 20),
    Evaluating: Evaluating(1, "csd0", 64, 128),
    Pong: Pong(1, "csd0", 1),
}
"""Of rank 1, but what only rank 0 may send."""
OUTCOMES: dict[Phase, dict[type[RankMessage], str]] = {
    Phase.STARTING: {ProcessEnded: END, Failed: END},
    Phase.TRAINING: {
        ProcessEnded: REGROUP,
        Failed: REGROUP,
        LinkLost: REGROUP,
        Misbehaved: REGROUP,
        Paused: REGROUP,
    },
    Phase.REGROUPING: {ProcessEnded: LOSS, Failed: LOSS, Misbehaved: LOSS, Ready: BACK},
    Phase.EXITING: {},
}
"""What is not listed leads to nothing that others notice."""


def reach(fleet: Fleet, phase: Phase) -> Supervisor:
    supervisor = fleet.supervise()
    supervisor._start()
    if phase is not Phase.STARTING:
        supervisor._form_group([0, 1, 2])
        while not supervisor._membership.has_trained:
            supervisor._act(supervisor._processes.next(1.0))
    if phase is Phase.EXITING:
        supervisor._membership.finished |= {0, 1, 2}
    if phase in (Phase.REGROUPING, Phase.EXITING):
        supervisor._phase = phase
    return supervisor


def observe(fleet: Fleet, supervisor: Supervisor, message: RankMessage) -> str:
    """Return what a message leads to that the user or another rank notices."""
    num_groups = len(fleet.groups)
    if isinstance(message, Ready) and supervisor._phase is Phase.REGROUPING:
        supervisor._membership.restarting.add(message.rank)
    try:
        supervisor._record_arrival(message)
        supervisor._act(message)
    except CsdctlError:
        return END
    if len(fleet.groups) > num_groups:
        return REGROUP
    if fleet.nodes_of(NodeLost):
        return LOSS
    return BACK if fleet.nodes_of(NodeBack) else NOTHING


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("message", MESSAGES.values(), ids=lambda message: type(message).__name__)
def test_message_leads_to_what_its_phase_says(fleet: Fleet, phase: Phase, message: RankMessage) -> None:
    supervisor = reach(fleet, phase)
    try:
        found = observe(fleet, supervisor, message)
        assert found == OUTCOMES[phase].get(type(message), NOTHING)
    finally:
        supervisor._processes.close()
        supervisor._end_links()


def test_every_message_that_is_acted_on_is_tried_in_every_phase() -> None:
    acted_on = {kind for row in ACTIONS.values() for kind in row}
    assert acted_on <= set(MESSAGES) <= {ProcessEnded, *EVENTS.values()}
    assert set(ACTIONS) == set(OUTCOMES) == set(Phase)
