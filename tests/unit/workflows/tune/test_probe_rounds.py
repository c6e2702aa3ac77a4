"""The sessions of all machines: which are kept for other settings and for a trial, and which start."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from csdctl.tuning.fleet_model import ProbeOutcome
from csdctl.worker.protocol.json_codec import RESULT, to_frame
from csdctl.worker.protocol.probe import READY, ProbeRequest, ProbeResult
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.tune.probing import IDLE, LOADING, MEASURED, MEASURING, FleetMeasurer, TuneWatch
from tests.fake_session import FakeConversation, FakeSession
from tests.unit.workflows.measured_project import make_project, run_context, workspace

USUAL, OTHER = Runtime(4), Runtime(4, onednn=False)
PEAK = 1 << 30


def answer(line: str) -> list[str]:
    request = json.loads(line)
    return (
        [to_frame(RESULT, ProbeResult(request["batch_size"], 0.1, 3, PEAK))]
        if "batch_size" in request
        else []
    )


class Watch(TuneWatch):
    """Keeps what each machine was said to do."""

    def __init__(self) -> None:
        self.doings: dict[str, list[str]] = {"host": [], "csd0": []}

    def on_machine(self, name: str, doing: str, batch_size: int = 0, samples_per_s: float = 0.0) -> None:
        self.doings[name].append(doing)

    def on_probes(self, outcomes: Mapping[str, ProbeOutcome]) -> None:
        pass


class Fleet:
    """A host and a node with workers that respond at once."""

    def __init__(self, directory: Path) -> None:
        at = make_project(directory, num_nodes=1)
        self.watch = Watch()
        self.sessions = {
            name: FakeSession(name).on(stdout=f"a model prints\n{READY}\n", replies=answer)
            for name in at.fleet.machines
        }
        self.rounds = FleetMeasurer(
            run_context(at, workspace(at, self.sessions, 2 * PEAK)),
            dict.fromkeys(self.sessions, USUAL),
            self.watch,
        )

    def of_node(self) -> list[FakeConversation]:
        return self.sessions["csd0"].conversations

    def probe(self) -> None:
        self.rounds.measure({name: ProbeRequest(8) for name in self.sessions})


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    with fleet.rounds:
        yield fleet
    assert all(
        conversation.is_closed
        for session in fleet.sessions.values()
        for conversation in session.conversations
    )


def test_trial_takes_the_sessions_that_measured(fleet: Fleet) -> None:
    fleet.probe()
    attach = fleet.rounds.prepare_trial({"host": USUAL, "csd0": USUAL})
    assert attach["csd0"]("spec.json", 1) is fleet.of_node()[0]
    assert json.loads(fleet.of_node()[0].sent[-1]) == {
        "request": "AttachRequest",
        "spec": "spec.json",
        "rank": 1,
    }
    assert len(fleet.of_node()) == 1


@pytest.mark.parametrize("taken", [USUAL, OTHER])
def test_machine_has_one_session_with_the_settings_that_are_measured(fleet: Fleet, taken: Runtime) -> None:
    fleet.probe()
    fleet.rounds.switch({"csd0": OTHER})
    fleet.probe()
    assert fleet.of_node()[0].is_closed
    attach = fleet.rounds.prepare_trial({"csd0": taken})
    used = attach["csd0"]("spec.json", 0)
    still_open = [conversation for conversation in fleet.of_node() if not conversation.is_closed]
    assert still_open == [used]
    assert len(fleet.of_node()) == (2 if taken == OTHER else 3)


def test_machine_outside_the_trial_has_no_session(fleet: Fleet) -> None:
    fleet.probe()
    fleet.rounds.prepare_trial({"csd0": USUAL})
    assert all(conversation.is_closed for conversation in fleet.sessions["host"].conversations)


def test_each_machine_is_shown_while_it_loads_and_measures(fleet: Fleet) -> None:
    fleet.probe()
    fleet.probe()
    assert fleet.watch.doings["csd0"] == [LOADING, IDLE, MEASURING, MEASURED, MEASURING, MEASURED]
    assert fleet.watch.doings["host"] == fleet.watch.doings["csd0"]
