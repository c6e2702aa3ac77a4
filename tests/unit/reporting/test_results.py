"""The results of a run with hand-computed totals, and what a list of runs says of it."""

import math
import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from csdctl.documents import load_kept, save_json
from csdctl.placement.equation1 import Placed
from csdctl.reporting.page import render_page
from csdctl.reporting.privacy import PassCounter
from csdctl.reporting.results import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    STOPPED,
    KeptStatus,
    RunFollower,
    RunStatus,
    RunSummary,
    Statuses,
    list_forecast_errors,
    load_run_status,
    read_results,
    summarize,
)
from csdctl.reporting.tables import describe_result, describe_run
from csdctl.runs.directory import DataFingerprints, Manifest, ProjectDirectory
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.worker.protocol.events import (
    MAX_STEPS,
    CheckpointSaved,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    NodeLost,
    Progress,
    Ready,
)
from csdctl.worker.protocol.events import STOPPED as ASKED_TO_STOP
from tests.unit.reporting.scripted_history import NODES as NODES_OF_HISTORY
from tests.unit.reporting.scripted_history import History
from tests.unit.runs.manifests import manifest_of, write_events

NODES = ("host", "csd0", "csd1")
PLANNED = {"host": (60, 70.0), "csd0": (10, 15.0), "csd1": (10, 15.0)}
PLAN = Plan(
    job="job",
    job_fingerprint="0" * 16,
    method="stannis",
    emulated=True,
    ranks=[
        RankPlan(node=node, batch_size=size, threads=4, samples_per_s=rate)
        for node, (size, rate) in PLANNED.items()
    ],
)
PLACED = [Placed("host", 60, 0, 0, 600), Placed("csd0", 10, 40, 600, 660), Placed("csd1", 10, 100, 660, 660)]
MANIFEST = Manifest(
    schema=1, plan=PLAN, placed=PLACED, data=DataFingerprints(public="f"), predicted_samples_per_s=90.0
)


def epoch_end(rank: int, epoch: int, weights_hash: str = "") -> EpochEnd:
    samples, compute_s, wait_s = (600, 6.0, 3.0) if rank == 0 else (100, 9.0, 1.0)
    overall = (800, 2.0 / epoch, 0.4 * epoch, 2.5 / epoch, 0.3 * epoch) if rank == 0 else ()
    work = 10, samples, compute_s, wait_s, 10.0
    return EpochEnd(rank, NODES[rank], epoch, *work, weights_hash or f"hash-{epoch}", *overall)


def finished(rank: int) -> Finished:
    return Finished(rank, NODES[rank], 2, 20, "hash-2", 1 << 20)


WHOLE: list[Event] = [
    *(Ready(rank, NODES[rank], 100) for rank in range(3)),
    *(epoch_end(rank, 1) for rank in (2, 0, 1)),
    CheckpointSaved(0, "host", 2, 10, "checkpoints/step-00000010.npz", is_best=True),
    Progress(0, "host", 2, 5, 5, 300, 3.0, 1.5, 5.0, 400, 9.9, 0.9),
    *(epoch_end(rank, 2) for rank in (0, 1, 2)),
    CheckpointSaved(0, "host", 2, 20, "checkpoints/step-00000020.npz"),
    *(finished(rank) for rank in (1, 2, 0)),
]


def follow(events: list[Event], num_ranks: int) -> RunFollower:
    follower = RunFollower(PassCounter(num_ranks))
    for event in events:
        follower.add(event)
    return follower


def summary(events: list[Event] = WHOLE, **changes: Any) -> RunSummary:
    manifest = MANIFEST.model_copy(update=changes)
    return summarize("20260101-000000-abcd", manifest, follow(events, len(NODES)))


def plan_of(rank: int, **changes: Any) -> Plan:
    ranks = [replace(part, **changes) if part is PLAN.ranks[rank] else part for part in PLAN.ranks]
    return PLAN.model_copy(update={"ranks": ranks})


def test_whole_run_is_added_up_over_its_epochs() -> None:
    result = summary()
    assert (result.run_id, result.method, result.emulated) == ("20260101-000000-abcd", "stannis", True)
    assert (result.num_ranks, result.global_batch) == (3, 80)
    assert (result.epochs, result.steps, result.samples, result.training_s) == (2, 20, 1600, 20.0)
    assert result.samples_per_s == pytest.approx(1600 / 18)  # 2 s of the 20 s are no step time
    assert result.predicted_samples_per_s == 90.0
    assert (result.alone_samples_per_s, result.efficiency) == pytest.approx((100.0, 16 / 18))
    assert (result.loss, result.accuracy) == pytest.approx((1.0, 0.8))
    assert (result.validation_loss, result.validation_accuracy) == pytest.approx((1.25, 0.6))
    assert (result.state, result.failures, result.identical_weights) == ("completed", (), True)
    assert describe_result(result).endswith("; best: epoch 1, validation loss 2.5000, best.keras")


def test_split_is_compared_with_its_busiest_rank() -> None:
    """The rates of whole models on each rank say nothing about parts of one."""
    result = summary(strategy="split", cut="block_4")
    busiest_s = max(rank.compute_s for rank in result.ranks)
    host = result.ranks[0]
    assert (result.strategy, result.cut) == ("split", "block_4")
    assert result.efficiency == pytest.approx(busiest_s / (host.compute_s + host.wait_s))
    assert result.alone_samples_per_s == pytest.approx(result.samples_per_s / result.efficiency)


def test_each_rank_has_samples_rate_and_waiting_time() -> None:
    host, csd0, csd1 = summary().ranks
    assert (host.node, host.batch_size, host.num_private, host.num_public) == ("host", 60, 0, 600)
    assert (csd0.num_private, csd0.num_public, csd1.num_private) == (40, 60, 100)
    assert (host.samples_per_s, csd0.samples_per_s) == pytest.approx((1200 / 18, 10.0))
    assert (host.alone_samples_per_s, csd0.alone_samples_per_s) == (70.0, 15.0)
    assert (host.compute_s, host.wait_s) == (12.0, 6.0)
    assert (host.waiting, csd0.waiting) == pytest.approx((1 / 3, 0.1))


@pytest.mark.parametrize("events", [[], WHOLE[:3]])
def test_run_that_ended_before_its_first_epoch_has_no_results(events: list[Event]) -> None:
    result = summary(events)
    assert (result.state, result.epochs, result.samples, result.samples_per_s) == ("interrupted", 0, 0, 0.0)
    assert (result.efficiency, result.loss, result.validation_accuracy) == (None, None, None)
    assert not result.identical_weights
    assert [rank.waiting for rank in result.ranks] == [0.0] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_missing_rate_of_a_rank_means_no_efficiency(rank: int) -> None:
    result = summary(plan=plan_of(rank, samples_per_s=None))
    assert (result.alone_samples_per_s, result.efficiency) == (None, None)
    assert result.samples_per_s == pytest.approx(1600 / 18)


def test_plan_whose_rates_were_measured_under_load_is_said_to_be_so() -> None:
    plan = PLAN.model_copy(update={"left_out": ["csd2"]})
    result = dict(describe_run(replace(summary(plan=plan), efficiency=1.24)))
    assert result["efficiency"].endswith("measured under load: tune again")
    assert result["left out"].startswith("csd2: training is faster")


def joined(*members: int, is_start: bool = False) -> Joined:
    return Joined(0, "host", 2, 0, 10, 10, {str(rank): 10 for rank in members}, is_start, num_lost=100)


def test_lines_that_are_not_known_are_counted_and_said(tmp_path: Path) -> None:
    run = ProjectDirectory(tmp_path).new_run()
    run.save_manifest(manifest_of(NODES))
    write_events(run, WHOLE, 1_000.0)
    run.events.write_text(
        '{"time":1000.0,"event":"Exited","rank":1,"node":"csd0"}\n{\n' + run.events.read_text()
    )
    assert load_run_status(run).status.state == COMPLETED
    result = read_results(run)
    assert (result.summary.state, result.summary.epochs, result.summary.steps) == ("completed", 2, 20)
    skipped = f"2 lines of runs/{run.run_id}/events.jsonl were skipped: damaged, or of another version"
    assert dict(describe_run(result.summary))["events"] == skipped
    assert skipped in render_page([result])


LOST: list[Event] = [
    *(epoch_end(rank, 1) for rank in (0, 1, 2)),
    NodeLost(2, "csd1", "no longer answers"),
    joined(0, 1),
    epoch_end(1, 2),
    replace(epoch_end(0, 2), num_lost=100),
    *(finished(rank) for rank in (0, 1)),
]


@pytest.mark.fault(20)
def test_run_that_continued_without_a_node_is_done_and_counts_unread_samples() -> None:
    result = summary(LOST)
    assert (result.state, result.lost_nodes, result.num_private_unread) == ("completed", ("csd1",), 100)
    assert result.identical_weights


ENDS = [epoch_end(rank, 2) for rank in (0, 1, 2)]


@pytest.mark.parametrize(
    ("ends", "is_identical"),
    [
        ([epoch_end(0, 1), epoch_end(1, 1), joined(0, 1)], True),
        ([epoch_end(0, 1), joined(0, 1), epoch_end(1, 1)], True),
        ([epoch_end(0, 1), epoch_end(1, 1), joined(0, 1), epoch_end(2, 1)], True),
        ([epoch_end(0, 1), epoch_end(1, 1), joined(0, 1), epoch_end(2, 1, "other")], False),
        ([epoch_end(0, 1), epoch_end(2, 1, "other"), joined(0, 1), epoch_end(1, 1)], False),
        ([joined(0, 1), epoch_end(0, 1), joined(0, 1, 2), epoch_end(1, 1)], True),
        ([joined(0, 1), epoch_end(0, 1), joined(0, 1, 2), epoch_end(1, 1, "other")], False),
        ([joined(0, 1), epoch_end(0, 1)], False),
        ([epoch_end(0, 1, "other"), epoch_end(1, 1), epoch_end(2, 1)], False),
        ([epoch_end(0, 1), epoch_end(1, 1, "other"), epoch_end(2, 1)], False),
        ([*ENDS, joined(0, 1, 2, is_start=True), *reversed(ENDS)], True),
        ([*ENDS, joined(0, 1, 2, is_start=True), epoch_end(1, 2, "other"), *ENDS[::2]], False),
    ],
)
def test_weights_are_those_of_the_ranks_that_ended_the_epoch(ends: list[Event], is_identical: bool) -> None:
    """A rank that was lost in it is not waited for, nor one that joins before the others' reports arrive."""
    assert summary(ends).identical_weights == is_identical


@pytest.mark.parametrize(("global_samples", "num_lost", "epochs"), [(400, 0, 1), (700, 100, 2), (800, 0, 2)])
def test_epoch_within_which_max_steps_ended_the_run_does_not_count(
    global_samples: int, num_lost: int, epochs: int
) -> None:
    last = replace(epoch_end(0, 2), global_samples=global_samples, num_lost=num_lost)
    result = summary(
        [epoch_end(0, 1), last, *(replace(finished(rank), reason=MAX_STEPS) for rank in range(3))]
    )
    assert result.epochs == epochs


def test_epochs_whose_ends_a_power_failure_took_from_the_log_count() -> None:
    resumed = [replace(joined(0, 1, 2, is_start=True), epoch=4, total_steps=30), epoch_end(0, 4)]
    tally = follow([epoch_end(0, 1), *resumed], 3).tally
    assert (tally.num_epochs, tally.steps, tally.samples) == (4, 40, 4 * 800)


def test_machine_that_does_not_train_is_no_part_of_what_the_ranks_reach_alone() -> None:
    result = summary(plan=plan_of(0, batch_size=0, samples_per_s=None))
    assert (result.alone_samples_per_s, result.global_batch) == (pytest.approx(30.0), 20)


PROGRESS = Progress(0, "host", 2, 7, 3, 96, 0.5, 0.25, 0.8, 128, 2.5, 0.1)
EPOCH_END = EpochEnd(0, "host", 2, 10, 100, 6.0, 3.0, 10.0, "hash", 800, 1.5, 0.5, 1.25, 0.625)
FINISHED = Finished(0, "host", 2, 20, "hash", 1 << 20)
OF_NODE = replace(FINISHED, rank=1, node="csd0")
FAILURE = Failed(1, "csd0", "disk full")


def status(directory: Path, *events: Event, **manifest: Any) -> RunStatus:
    run = ProjectDirectory(directory).new_run()
    run.save_manifest(manifest_of() | manifest)
    return load_run_status(write_events(run, events, 1_000.0)).status


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], INTERRUPTED),
        ([PROGRESS], INTERRUPTED),
        ([PROGRESS, OF_NODE], INTERRUPTED),
        ([PROGRESS, FINISHED], COMPLETED),
        ([PROGRESS, FINISHED, OF_NODE], COMPLETED),
        ([PROGRESS, replace(FINISHED, reason=ASKED_TO_STOP), OF_NODE], STOPPED),
        ([PROGRESS, FAILURE], FAILED),
        ([PROGRESS, FAILURE, PROGRESS], INTERRUPTED),
        ([PROGRESS, FAILURE, PROGRESS, OF_NODE, FINISHED], COMPLETED),
        ([PROGRESS, OF_NODE, FINISHED, joined(0, 1, is_start=True), EPOCH_END], INTERRUPTED),
        ([OF_NODE, FINISHED, joined(0, 1, is_start=True), OF_NODE, FINISHED], COMPLETED),
    ],
)
def test_state_is_what_the_last_events_say(events: list[Event], state: str) -> None:
    assert follow(events, 2).state == state


def test_run_that_goes_on_has_its_epoch_step_and_rate(tmp_path: Path) -> None:
    result = status(tmp_path, EPOCH_END, replace(PROGRESS, epoch=3), recipe={"epochs": 5})
    assert (result.epoch, result.step, result.epochs, result.num_ranks) == (3, 7, 5, 2)
    assert result.samples_per_s == pytest.approx((800 + 128) / (9.0 + 0.75))  # of the run, as in its report
    assert (result.loss, result.accuracy, result.validation_loss) == (2.5, 0.1, 1.25)
    assert result.last_event_s == 1_001.0


def test_run_says_why_it_ended_before_its_last_epoch_and_how_its_csdctl_ended(tmp_path: Path) -> None:
    run = ProjectDirectory(tmp_path).new_run()
    run.save_manifest(manifest_of())
    write_events(run, [PROGRESS], 1_000.0)
    assert read_results(run).summary.state == load_run_status(run).status.state == INTERRUPTED
    save_json(run.process, {"state": FAILED, "error": "csd0: rank 1 was killed by signal 9"})
    assert read_results(run).summary.state == load_run_status(run).status.state == FAILED
    assert read_results(run).summary.failures == ("csd0: rank 1 was killed by signal 9",)
    save_json(run.process, {})
    ends = [
        replace(FINISHED, rank=rank, node=node, reason=MAX_STEPS) for rank, node in ((0, "host"), (1, "csd0"))
    ]
    result = load_run_status(write_events(run, ends, 1_002.0)).status
    assert (result.state, result.reason) == (COMPLETED, MAX_STEPS)
    assert describe_result(read_results(run).summary).startswith("completed: 3 steps (--max-steps)")


def test_errors_of_forecasts_are_those_of_undisturbed_runs_whose_plan_had_been_tried(tmp_path: Path) -> None:
    project, complete = ProjectDirectory(tmp_path), replace(EPOCH_END, steps=30)
    tried = {"predicted_samples_per_s": 80.0, "predicted_range": [70.0, 90.0]}
    status(tmp_path, complete, PROGRESS, **tried)
    status(tmp_path, joined(0, 0), complete, **tried)
    status(tmp_path, EPOCH_END, **tried)  # ten steps
    status(tmp_path, complete, **tried | {"predicted_range": None})  # not tried, or edited since
    status(tmp_path, complete)
    status(tmp_path, replace(complete, global_samples=0), **tried)
    project.new_run()
    (damaged := project.new_run()).save_manifest(manifest_of() | tried)
    damaged.events.mkdir()
    assert list_forecast_errors(project) == pytest.approx([math.log((928 / 9.75) / 80)])
    status(tmp_path, complete, **tried | {"predicted_samples_per_s": 800 / 9})
    (tmp_path / ".csdctl" / "runs" / project.run_ids()[-1]).rename(tmp_path / "moved")
    (tmp_path / ".csdctl" / "runs" / "20990101-000000-000000").symlink_to(tmp_path / "moved")
    assert list_forecast_errors(project) == ()


def kept_as_file(kept: KeptStatus, directory: Path) -> KeptStatus:
    """Return a status as the next command reads it."""
    save_json(directory / "statuses.json", {"run": kept})
    read = load_kept(directory / "statuses.json", Statuses)
    assert read
    return read["run"]


@pytest.mark.parametrize("seed", range(12))
def test_log_that_is_read_in_parts_tells_the_same_as_when_it_is_read_at_once(
    seed: int, tmp_path: Path
) -> None:
    """While csdctl trains, whatever has been written of the last line."""
    random = Random(seed)
    run = write_events(ProjectDirectory(tmp_path).new_run(), [event for _, event in History(random).events])
    run.save_manifest(manifest_of(NODES_OF_HISTORY))
    save_json(run.process, {"pid": 1})
    log, kept = run.events.read_bytes(), None
    run.events.write_bytes(b"")
    for stop in [*sorted(random.sample(range(len(log)), 10)), len(log)]:
        with run.events.open("ab") as file:
            file.write(log[run.events.stat().st_size : stop])
        kept = kept_as_file(load_run_status(run, kept), tmp_path)
        assert kept == load_run_status(run)
    save_json(run.process, {"pid": 1, "ended": "2026-01-01"})
    assert load_run_status(run, kept) == load_run_status(run)
    assert load_run_status(run, kept).status.state == COMPLETED


def test_status_counts_until_a_file_of_the_run_changes(tmp_path: Path) -> None:
    run = ProjectDirectory(tmp_path).new_run()
    run.save_manifest(manifest_of())
    write_events(run, [replace(PROGRESS, loss=math.nan)], 1_000.0)
    kept = kept_as_file(load_run_status(run), tmp_path)
    assert load_run_status(run, kept) is kept
    assert math.isnan(kept.status.loss or 0.0)
    for change in (
        lambda: write_events(run, [EPOCH_END], 1_001.0),
        lambda: save_json(run.process, {"pid": 1}),
        lambda: save_json(run.process, {"state": FAILED, "ended": "2026-01-01"}),
        lambda: run.save_manifest(manifest_of() | {"recipe": {"epochs": 7}}),
        lambda: os.utime(run.events),
        run.events.unlink,
        run.manifest.unlink,
    ):
        change()
        fresh, kept_before = load_run_status(run), kept
        kept = kept_as_file(load_run_status(run, kept), tmp_path)
        assert kept == fresh != kept_before


def test_log_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    """A copy of another run's, or an edited one, that is as long or longer."""
    run = ProjectDirectory(tmp_path).new_run()
    run.save_manifest(manifest_of())
    save_json(run.process, {"pid": 1})
    write_events(run, [PROGRESS] * 3, 1_000.0)
    kept = load_run_status(run)
    run.events.write_bytes(b"")
    write_events(run, [EPOCH_END] * 9, 2_000.0)
    assert load_run_status(run, kept).status == load_run_status(run).status


def test_run_without_a_manifest_has_its_state_alone(tmp_path: Path) -> None:
    run = ProjectDirectory(tmp_path).new_run()
    assert load_run_status(run).status == RunStatus(run.run_id, INTERRUPTED)
