"""`train`: one new run, from the plan to the model.

A run succeeds when every rank that takes part has sent a completion record.
"""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from csdctl.documents import save_json, save_text
from csdctl.energy.sampler import PowerSampler
from csdctl.job.model import Job
from csdctl.launch.machine_lock import describe_holder
from csdctl.placement.equation1 import steps_per_epoch
from csdctl.reporting.summary import RunSummary, summarize_run
from csdctl.runs.directory import EventLog, RunDirectory
from csdctl.runs.private import keep_step_file
from csdctl.shipping.deliver import Delivery
from csdctl.supervision.event_callbacks import EventCallbacks
from csdctl.supervision.supervisor import USER
from csdctl.tuning.plan import Plan
from csdctl.tuning.strategies import FEATURES, SPLIT
from csdctl.worker.protocol.events import Event
from csdctl.worker.protocol.features import FeatureOptions
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.data.deploy import cut_shards
from csdctl.workflows.data.features import COMPUTING, FeatureRun, compute_features
from csdctl.workflows.data.prepare import OnPrepareProgress, Prepared
from csdctl.workflows.train.host_alone import leave_to_host
from csdctl.workflows.train.options import TrainOptions, choose_planned_strategy
from csdctl.workflows.train.placement import place_plan
from csdctl.workflows.train.ranks import RunInputs, run_ranks
from csdctl.workflows.train.spec import build_manifest, build_spec, describe_strategy
from csdctl.workflows.train.split import use_split
from csdctl.workflows.workspace.workspace import Workspace


class RunObserver(Protocol):
    """Called during the run by the thread that supervises it; a slow callback delays supervision."""

    def say(self, line: str, /) -> None:
        """Show one line."""

    def preparing(
        self, what: str = ..., expected: Sequence[str] = ..., /
    ) -> AbstractContextManager[OnPrepareProgress]:
        """Open a view of the progress of `what`, of which the names in `expected` report.

        It is closed before anything else is shown but lines of text.
        """

    def on_start(self, run: RunDirectory, spec: RunSpec, num_steps: int, /) -> None:
        """The run starts; an epoch has `num_steps` steps."""

    def on_delivery(self, node: str, delivery: Delivery, /) -> None:
        """Files have reached `node`."""

    def on_event(self, event: Event, /) -> None:
        """A rank or the supervisor has reported `event`."""


class RunStopped(KeyboardInterrupt):
    """The user has interrupted the run; its state is kept."""

    def __init__(self, run_id: str, summary: RunSummary) -> None:
        super().__init__(f"run {run_id} was interrupted; `csdctl train --resume {run_id}` continues it")
        self.run_id = run_id
        self.summary = summary


def train(
    job: Job, plan: Plan, prepared: Prepared, space: Workspace, options: TrainOptions, observer: RunObserver
) -> RunSummary:
    """Train a new run to its end.

    Raises RunError, DeadlineError or InputError when it fails, RunStopped when the user stops it. The caller
    has locked the machines and called `plan_validation.check_plan`.
    """
    strategy, cut = choose_planned_strategy(options.strategy, options.cut, plan)
    gathered = None
    if strategy == FEATURES and plan.trains_on_host:
        plan, gathered = leave_to_host(plan, job, prepared, space, options.features, observer)
    placed = place_plan(plan, prepared, job, space.fleet)
    run = space.project.new_run()
    save_json(run.process, describe_holder("train", space.project.root))
    manifest = build_manifest(job, plan, placed, prepared, space)
    run.save_manifest(manifest | describe_strategy(plan, strategy, cut))
    shards = cut_shards(placed, prepared.public, job, space.project)
    spec = dataclasses.replace(
        build_spec(run, job, plan, placed, prepared, shards, space),
        step_file=str(space.project.step_file(run)),
        is_balanced=options.is_balanced,
        checkpoint_interval_s=options.checkpoint_interval_s,
        num_checkpoints=options.num_checkpoints,
        max_steps=options.max_steps,
    )
    if strategy == SPLIT:
        spec = use_split(spec, job, prepared, cut, options.num_micro_batches)
    inputs = RunInputs(run, spec, prepared, shards)
    if strategy == FEATURES:
        inputs = use_features(inputs, space, options.features, observer, gathered)
    save_text(run.spec, to_json(inputs.spec))
    return run_to_end(inputs, steps_per_epoch(placed), space, options, observer)


def use_features(
    inputs: RunInputs,
    space: Workspace,
    options: FeatureOptions,
    observer: RunObserver,
    gathered: FeatureRun | None = None,
) -> RunInputs:
    """Return the run of the model's head, after the features of all samples have been computed.

    `gathered`: those that all machines have computed for the host.
    """
    nodes = [rank.node for rank in inputs.spec.ranks]
    with observer.preparing(COMPUTING, nodes) as on_progress:
        run = compute_features(
            inputs.spec, inputs.prepared, inputs.shards, space, options, observer.on_delivery, on_progress
        )
    if gathered is None:
        observer.say(run.describe())
    made = gathered or run
    content = {
        "layer": made.layer,
        "precision": options.precision,
        "engine": options.engine,
        "num_computed": made.num_computed,
        "elapsed_s": made.elapsed_s,
    }
    inputs.directory.save_manifest(inputs.directory.load_manifest() | {"features": content})
    return RunInputs(inputs.directory, run.spec, run.prepared, {})


def run_to_end(
    inputs: RunInputs, num_steps: int, space: Workspace, options: TrainOptions, observer: RunObserver
) -> RunSummary:
    """Run the ranks, log their events, and add them up; raises what `train` raises.

    A run that a callback has stopped returns as one that has come to its end; its state is kept.
    """
    run = inputs.directory
    observer.on_start(run, inputs.spec, num_steps)
    log = EventLog(run)
    is_done = is_interrupted = False
    with (
        PowerSampler(run, space.fleet, space.sessions, observer.say),
        EventCallbacks(options.callbacks, run.run_id, observer.say) as callbacks,
    ):

        def record(event: Event) -> None:
            time_s = time.time()
            log.append(time_s, event)
            observer.on_event(event)
            callbacks.put(time_s, event)

        try:
            stopped_by = run_ranks(
                inputs,
                space,
                options,
                observer.on_delivery,
                record,
                should_stop=lambda: callbacks.has_stopped,
            )
            is_done, is_interrupted = not stopped_by, stopped_by == USER
        except KeyboardInterrupt:
            is_interrupted = (
                True  # the ranks were ended at once; the state of the last completed step is kept
            )
        finally:
            log.close()
            settle_step_file(inputs, is_done=is_done)
    summary = summarize_run(run)
    if is_interrupted:
        raise RunStopped(run.run_id, summary)
    return summary


def settle_step_file(inputs: RunInputs, *, is_done: bool) -> None:
    """Remove the step file from memory; keep it on disk for `train --resume`, unless the run is done."""
    step_file, kept = Path(inputs.spec.step_file), inputs.directory.kept_step_file
    if not is_done:
        keep_step_file(step_file, kept)
        return
    for path in (step_file, kept):
        path.unlink(missing_ok=True)
