"""A trial: the ranks of a plan take a few steps together, as in training, with random samples.

The speed of single machines does not predict the fleet: ranks wait for the slowest of many noisy steps, and
for the sum. A trial uses the links, the collective and the processes of a training run. It reads no data,
and keeps no output.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from csdctl.errors import RunError
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.runs.directory import RunDirectory
from csdctl.supervision.rank_processes import AttachRank
from csdctl.tuning.fleet_model import TrialResult
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import EpochEnd, Event, Finished, Joined, Progress
from csdctl.worker.protocol.run_spec import (
    ELEMENT_SPEC,
    TRIAL,
    TRIAL_SPLIT,
    RunSpec,
    SplitSpec,
    TaskSpec,
)
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.options import TrainOptions
from csdctl.workflows.train.run import RunInputs, run_ranks
from csdctl.workflows.train.spec import build_spec, place_ranks
from csdctl.workflows.workspace.workspace import Workspace

SKIPPING_FROM = 10
"""In a trial of at least this many steps, those before a rank's first progress event do not count: the first
step is slow. A trial of fewer has long steps, without a slow first one."""


def run_trial(
    job: Job,
    ranks: Sequence[RankPlan],
    prepared: Prepared,
    space: Workspace,
    num_steps: int,
    attach: Mapping[str, AttachRank] | None = None,
    split: SplitSpec | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> TrialResult:
    """Take `num_steps` steps; machines in `attach` use a process that is already running.

    `split`: where the model is cut in two, if it is.

    Raises what `train` raises, and KeyboardInterrupt when it is stopped.
    """
    started = time.monotonic()
    run = space.project.new_scratch()
    spec = _build_spec(run, job, ranks, prepared, space, num_steps, split)
    events: list[Event] = []

    def take(event: Event) -> None:
        events.append(event)
        on_event(event)

    options = TrainOptions(min_nodes=len(ranks) - 1)
    try:
        inputs = RunInputs(run, spec, prepared, shards={})
        is_stopped = run_ranks(inputs, space, options, lambda *_: None, take, attach)
    finally:
        Path(spec.step_file).unlink(missing_ok=True)
    shutil.rmtree(run.path, ignore_errors=True)
    if is_stopped:
        raise KeyboardInterrupt
    result = read_trial(events, [rank.node for rank in ranks])
    steps_s = result.step_s * num_steps
    return replace(result, fixed_s=max(0.0, time.monotonic() - started - steps_s))


def _build_spec(
    run: RunDirectory,
    job: Job,
    ranks: Sequence[RankPlan],
    prepared: Prepared,
    space: Workspace,
    num_steps: int,
    split: SplitSpec | None,
) -> RunSpec:
    """Return a run of random samples, as many of them private as in training."""
    placed = place_ranks(ranks, prepared, job)
    spec = build_spec(run, job, ranks, placed, prepared, {}, space)
    specs = []
    for rank, shard in zip(spec.ranks, placed, strict=True):
        num_samples = rank.batch_size * num_steps
        # Matters only with noise, when each private sample has a gradient of its own.
        num_private = num_samples * shard.num_private // max(1, shard.num_samples)
        specs.append(
            replace(
                rank,
                private=None,
                public=None,
                num_private=num_private,
                num_public=num_samples - num_private,
                public_start=0,
                num_repeated=0,
                weight=1.0,
            )
        )
    return replace(
        spec,
        # Random labels teach nothing: a learning rate of 0 keeps the weights, and keeps them finite.
        recipe=replace(
            prepared.recipe,
            epochs=1,
            learning_rate=0.0,
            schedule="",
            early_stopping=None,
            reduce_on_plateau=None,
        ),
        ranks=tuple(specs),
        public=None,
        validation=None,
        # As in a training run, rank 0 saves the state of every step, which takes time.
        step_file=str(space.project.step_file(run)),
        num_checkpoints=0,
        is_balanced=False,
        task=TaskSpec(TRIAL_SPLIT if split else TRIAL, {ELEMENT_SPEC: asdict(prepared.public.element_spec)}),
        split=split,
    )


def read_trial(events: Sequence[Event], nodes: Sequence[str]) -> TrialResult:
    """Sum up the events of the ranks on `nodes`; raises RunError unless all took all steps undisturbed."""
    joined = [event for event in events if isinstance(event, Joined) and event.rank == 0]
    ended = {event.rank: event for event in events if isinstance(event, EpochEnd)}
    memory = {event.rank: event.peak_memory_bytes for event in events if isinstance(event, Finished)}
    first: dict[int, Progress] = {}
    for event in events:
        if isinstance(event, Progress):
            first.setdefault(event.rank, event)
    missing = [node for rank, node in enumerate(nodes) if not _has_taken_part(rank, ended, first)]
    if missing or len({event.generation for event in joined}) > 1:
        what = (
            f"ended before {format_node_names(missing)} had done all steps" if missing else "lost its links"
        )
        raise RunError(f"the trial {what}", remedy="check the machines with `csdctl doctor`, then tune again")
    counted = [_skip(ended[rank], first.get(rank)) for rank in range(len(nodes))]
    host = counted[0]
    wall_s = host.compute_s + host.wait_s
    return TrialResult(
        num_steps=host.steps,
        step_s=wall_s / host.steps,
        samples_per_s=host.stepped_samples / wall_s,
        compute_s=tuple(epoch.compute_s / epoch.steps for epoch in counted),
        wall_s=ended[0].wall_s,
        collective=joined[-1].collective,
        sum_s=joined[-1].sum_s,
        peak_memory_bytes=tuple(memory.values()) if len(memory) == len(nodes) else (),
    )


def _has_taken_part(rank: int, whole: Mapping[int, EpochEnd], first: Mapping[int, Progress]) -> bool:
    """Return whether a rank has reported all steps of rank 0, and that it computed in them."""
    if rank not in whole or 0 not in whole or whole[rank].steps != whole[0].steps:
        return False
    counted = _skip(whole[rank], first.get(rank))
    return counted.steps > 0 and (counted.compute_s > 0 or rank == 0)  # the host may sit out


def _skip(whole: EpochEnd, first: Progress | None) -> EpochEnd:
    """Return what a rank did after its `first` progress event, when the steps before do not count."""
    if first is None or whole.steps < SKIPPING_FROM or first.steps == whole.steps:
        return whole
    return replace(
        whole,
        steps=whole.steps - first.steps,
        compute_s=whole.compute_s - first.compute_s,
        wait_s=whole.wait_s - first.wait_s,
        stepped_samples=whole.stepped_samples - first.global_samples,
    )
