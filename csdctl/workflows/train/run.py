"""One run of ranks: deliver what is missing, start, supervise, log the events, end, and add up what was sent.

Whatever happens, no process of the run is left on any machine: processes with its id are ended over SSH.
"""

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from csdctl.documents import save_json
from csdctl.energy.sampler import PowerSampler
from csdctl.errors import DeadlineError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.launch.leftovers import describe_holder
from csdctl.reporting.results import COMPLETED, FAILED, STOPPED, RunSummary, read_results
from csdctl.runs.directory import EventLog, RunDirectory, keep_step_file
from csdctl.shipping.store import StoredFile, store_bytes
from csdctl.supervision.event_callbacks import EventCallbacks
from csdctl.supervision.supervisor import USER
from csdctl.worker.protocol.events import Event
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.orders import Order
from csdctl.workflows.data.files import deploy_files
from csdctl.workflows.preflight.doctor import explain_failure
from csdctl.workflows.preflight.ranks import Conditions, run_spec
from csdctl.workflows.train.late import prepare_late_node
from csdctl.workflows.train.spec import RunInputs, TrainOptions
from csdctl.workflows.workspace.event_stream import EventStream, RunStarted
from csdctl.workflows.workspace.workspace import Workspace


def record_process(run: RunDirectory, space: Workspace) -> None:
    """Record that this process trains `run` and, once the machines are unlocked, how that ended."""
    holder = describe_holder("train", space.project.root)
    held = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # tells this process from others
    space.after.callback(os.close, held)
    save_json(run.process, holder)

    def record_end(_kind: object, error: BaseException | None, _trace: object) -> None:
        end = {"ended": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"}
        if error is not None:
            state = STOPPED if isinstance(error, KeyboardInterrupt) else FAILED
            end |= {"state": state, "error": f"{error} ({end['ended']})"}
        with suppress(OSError):  # the run is over, whether or not this can be written
            save_json(run.process, holder | end)

    space.after.push(record_end)


def run_ranks(
    inputs: RunInputs,
    space: Workspace,
    options: TrainOptions,
    events: EventStream,
    should_stop: Callable[[], bool] = lambda: False,
    next_order: Callable[[], Order | None] = lambda: None,
) -> str:
    """Run the ranks to their end. Return who stopped them (`Supervisor.stopped_by`).

    Ranks of nodes that cannot be reached join once they can. Raises RunError, DeadlineError, InputError or
    PartialError.
    """
    prepared, run, fleet = inputs.prepared, inputs.directory, space.fleet
    spec = replace(inputs.spec, link_key=secrets.token_hex(16))
    present = set(fleet.machines)
    nodes = [rank.node for rank in spec.ranks if rank.node in present and rank.node != HOST_NAME]
    for_servers: list[StoredFile] = []
    if run.manifest.exists() and any(fleet.server_of(name) == name for name in nodes):
        for_servers = [store_bytes(run.manifest.read_bytes(), ".json", space.project.root)]
        spec = replace(spec, manifest=for_servers[0].path)
    stored_spec = store_bytes(to_json(spec).encode(), ".json", space.project.root)
    files = {name: [*prepared.files, *inputs.shards.get(name, ()), stored_spec] for name in nodes}
    for name in nodes:
        files[name] += for_servers if fleet.server_of(name) == name else []
    deploy_files(files, fleet, space.sessions, events)
    least = 1 if options.min_nodes is None else options.min_nodes
    conditions = Conditions(
        # A host that sits out cannot continue alone.
        min_nodes=min(max(least, spec.ranks[0].batch_size == 0), len(nodes)),
        is_resumable=spec.num_checkpoints > 0,
        patience=options.deadlines,
        should_stop=should_stop,
        next_order=next_order,
        model_bytes=prepared.model.weights.size,
        prepare_late_node=prepare_late_node(inputs, spec, space),
    )
    return run_spec(spec, stored_spec.path, run, prepared.worker.path, space, events.emit, conditions)


class RunStopped(KeyboardInterrupt):
    """The user has interrupted the run. Its state is kept."""

    def __init__(self, run_id: str, summary: RunSummary) -> None:
        how = f"`csdctl train --resume {run_id}`, or resume={run_id!r} in Python,"
        super().__init__(f"run {run_id} was interrupted; {how} continues it")
        self.run_id = run_id
        self.summary = summary


def run_to_end(
    inputs: RunInputs, num_steps: int, space: Workspace, options: TrainOptions, events: EventStream
) -> RunSummary:
    """Run the ranks, log their events, and add them up. Raises what `train` raises.

    A run that a callback has stopped returns as one that has come to its end. Its state is kept.
    """
    run = inputs.directory
    predicted_range = run.load_manifest()["predicted_range"]
    events.emit(RunStarted(run, inputs.spec, num_steps, predicted_range))
    log = EventLog(run, say=events.say)
    is_done = is_interrupted = is_full = False
    with (
        PowerSampler(run, space.fleet, space.sessions, events.say),
        EventCallbacks(options.callbacks, run.run_id, events.say) as callbacks,
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
            stopped_by = run_ranks(inputs, space, options, stream, should_stop=lambda: callbacks.has_stopped)
            is_done, is_interrupted = not stopped_by, stopped_by == USER
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
                settle_step_file(inputs, is_done=is_done)
    summary = read_results(run).summary
    if is_interrupted and summary.state != COMPLETED:
        raise RunStopped(run.run_id, replace(summary, state=STOPPED))
    if is_interrupted:  # after the last step: nothing is left to resume
        settle_step_file(inputs, is_done=True)
    return summary


def settle_step_file(inputs: RunInputs, *, is_done: bool) -> None:
    """Remove the step file from memory. Keep it on disk for `train --resume`, unless the run is done."""
    step_file, kept = Path(inputs.spec.step_file), inputs.directory.kept_step_file
    if not is_done:
        keep_step_file(step_file, kept)
        return
    for path in (step_file, kept):
        with suppress(OSError):  # the run is complete, whatever is in their place
            path.unlink(missing_ok=True)
