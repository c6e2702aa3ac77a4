"""Sessions with machines that are probed, which of them a trial takes, and the result of a trial."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import RemoteCommandError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import EpochEnd, Event, Finished, Joined, Progress, SumTimed
from csdctl.worker.protocol.json_codec import RESULT, from_json, to_frame
from csdctl.worker.protocol.probe import READY, ProbeRequest, ProbeResult, ProbeSpec
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.tune.probing import FleetMeasurer, Prober, _build_spec, build_probe_command, read_trial
from tests.fake_session import FakeConversation, FakeSession
from tests.unit.workflows.measured_project import (
    PUBLIC,
    MeasuredProject,
    make_project,
    prepared,
    run_context,
    workspace,
)

COMMAND = ["python", "worker.pyz", "probe"]


def result(batch_size: int, peak_memory_bytes: int = 1000) -> str:
    return to_frame(RESULT, ProbeResult(batch_size, 0.1, 10, peak_memory_bytes))


def session(*replies: str, exit_code: int = 0, stderr: str = "") -> FakeSession:
    left = iter(replies)
    return FakeSession("csd0").on(
        "python", stdout=f"{READY}\n", replies=lambda line: [next(left)], exit_code=exit_code, stderr=stderr
    )


@pytest.mark.parametrize(
    ("peaks", "num_fitting"),
    [
        ({8: 700, 16: 900, 32: 0}, 2),  # not tried: 900 + 16 · 25 = 1300 bytes
        ({32: 1190, 16: 1190}, 2),  # above 90% of the memory, and yet it fitted
    ],
)
def test_size_that_is_predicted_not_to_fit_is_not_tried_unless_a_larger_one_did(
    peaks: dict[int, int], num_fitting: int
) -> None:
    with closing(Prober(session(*(result(*one) for one in peaks.items())), COMMAND, 1200)) as prober:
        prober.start()
        times = [prober.measure(ProbeRequest(size)).step_time_s for size in peaks]
    assert [bool(seconds) for seconds in times] == [number < num_fitting for number in range(len(peaks))]


def test_peak_of_the_process_is_not_recorded_for_a_smaller_size() -> None:
    with closing(Prober(session(result(8, 700), result(16, 900), result(8, 900)), COMMAND, None)) as prober:
        prober.start()
        for size in (8, 16, 8):
            prober.measure(ProbeRequest(size))
        assert prober.peaks[8] == 700


def test_worker_that_fails_otherwise_is_an_error_with_its_cause() -> None:
    noise = "I0000 00:00:1 port.cc] oneDNN custom operations are on\n"
    with closing(
        Prober(session(exit_code=1, stderr=f"{noise}ImportError: no numpy\n{noise}"), COMMAND, None)
    ) as prober:
        prober.start()
        with pytest.raises(RemoteCommandError, match="ImportError: no numpy") as raised:
            prober.measure(ProbeRequest(64))
    assert raised.value.node == "csd0"


def test_size_that_killed_the_worker_is_recorded() -> None:
    with closing(Prober(session(exit_code=137), COMMAND, None)) as prober:
        prober.start()
        outcome = prober.measure(ProbeRequest(64))
        assert outcome.step_time_s is None
        assert outcome.is_oom_kill


@pytest.mark.parametrize("noise", [None, Noise(1.0, 1.1, 1e-5)])
def test_noise_is_measured_on_nodes_with_private_samples(at: MeasuredProject, noise: Noise | None) -> None:
    data = prepared(at)
    data.private = {"csd0": PUBLIC}
    context = run_context(replace(at, job=replace(at.job, noise=noise)), workspace(at, {}), data)
    for name, is_private in (("csd0", True), ("csd1", False)):
        command = build_probe_command(name, context, Runtime())
        spec = from_json(ProbeSpec, command[command.index("--spec") + 1])
        assert (spec.noise, spec.is_private) == (noise, is_private)


USUAL, OTHER = Runtime(4), Runtime(4, onednn=False)
PEAK = 1 << 30


def answer(line: str) -> list[str]:
    request = json.loads(line)
    return (
        [to_frame(RESULT, ProbeResult(request["batch_size"], 0.1, 3, PEAK))]
        if "batch_size" in request
        else []
    )


class Fleet:
    """A host and a node with workers that respond at once."""

    def __init__(self, directory: Path) -> None:
        at = make_project(directory, num_nodes=1)
        self.sessions = {
            name: FakeSession(name).on(stdout=f"a model prints\n{READY}\n", replies=answer)
            for name in at.fleet.machines
        }
        self.rounds = FleetMeasurer(
            run_context(at, workspace(at, self.sessions, 2 * PEAK)), dict.fromkeys(self.sessions, USUAL)
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


NODES = ("host", "csd0")


JOINED = Joined(0, "host", 1, 0, 20, 0, {"0": 30, "1": 10}, is_start=True)


def first_progress(rank: int) -> Progress:
    """Two slow steps."""
    return Progress(rank, NODES[rank], 1, 2, 2, 60, 1.0, 0.5, 1.5, 80 if rank == 0 else 0)


def epoch_end(rank: int, steps: int = 20) -> EpochEnd:
    """After the first two, steps of 0.1 s: the host computes for 0.09 s of it, the node for 0.08 s."""
    later = steps - 2
    compute_s = 1.0 + later * (0.09 if rank == 0 else 0.08)
    wait_s = 0.5 + later * (0.01 if rank == 0 else 0.02)
    samples = 40 * steps if rank == 0 else 0
    return EpochEnd(
        rank, NODES[rank], 1, steps, 0, compute_s, wait_s, 9.0, "", samples, stepped_samples=samples
    )


def test_first_steps_of_many_do_not_count_and_few_steps_all_count() -> None:
    events: list[Event] = [
        JOINED,
        SumTimed(0, "host", (0, 1), 1 << 20, 0.02),
        *(first_progress(rank) for rank in (0, 1)),
        *(epoch_end(rank) for rank in (0, 1)),
        *(Finished(rank, NODES[rank], 1, 20, "", (1 + rank) << 20) for rank in (1, 0)),
    ]
    result = read_trial(events, NODES)
    assert result.peak_memory_bytes == (1 << 20, 2 << 20)
    assert (result.num_steps, result.step_s) == (18, pytest.approx(0.1))
    assert result.samples_per_s == pytest.approx(400)
    assert result.compute_s == pytest.approx((0.09, 0.08))
    assert (result.wall_s, result.sum_s) == (9.0, 0.02)
    few = [JOINED, first_progress(0), epoch_end(0, 9), epoch_end(1, 9)]
    assert read_trial(few, NODES).num_steps == 9
    assert read_trial(few, NODES).peak_memory_bytes == (None, None)


@pytest.mark.parametrize("again", [JOINED, replace(JOINED, is_start=False)])
def test_trial_that_lost_its_links_is_an_error(again: Joined) -> None:
    events: list[Event] = [JOINED, again, epoch_end(0), epoch_end(1)]
    with pytest.raises(RunError, match="lost its links"):
        read_trial(events, NODES)


@pytest.mark.parametrize(
    "of_node",
    [
        [],
        [first_progress(1), epoch_end(1, 19)],
        [first_progress(1), replace(epoch_end(1), steps=0)],
        [first_progress(1), replace(epoch_end(1), compute_s=0.0)],
        [replace(first_progress(1), steps=21), epoch_end(1)],
        [replace(first_progress(1), compute_s=99.0), epoch_end(1)],
    ],
)
def test_node_with_missing_or_impossible_steps_is_named(of_node: list[Event]) -> None:
    with pytest.raises(RunError, match="before csd0 had done all steps"):
        read_trial([JOINED, *of_node[:1], epoch_end(0), *of_node[1:]], NODES)


@pytest.mark.parametrize("noise", [None, Noise(1.0, 1.1, 1e-5)])
def test_trial_adds_the_noise_of_the_job_to_its_private_share(
    at: MeasuredProject, noise: Noise | None
) -> None:
    data = prepared(at)
    data.private, data.num_private = {"csd0": PUBLIC}, {"csd0": 3_000}
    ranks = [RankPlan(node=name, batch_size=10, threads=1) for name in (HOST_NAME, "csd0")]
    space = workspace(at, {rank.node: FakeSession(rank.node) for rank in ranks})
    context = run_context(replace(at, job=replace(at.job, noise=noise)), space, data)
    spec = _build_spec(at.project.new_scratch(), ranks, context, 20, is_split=False)
    assert spec.noise == noise
    host, csd0 = spec.ranks
    assert host.num_private == 0 < csd0.num_private
    assert csd0.num_private + csd0.num_public == 200
