"""Targets of fuzzing that people or csdctl write: job, fleet, plan, runs, facts, inventories."""

import dataclasses
import io
import json
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from csdctl.errors import InputError
from csdctl.fleet.ansible import list_targets, parse_inventory
from csdctl.fleet.facts import Facts, facts_path, load_facts, save_facts
from csdctl.fleet.fleet_file import load_fleet, render_fleet
from csdctl.fleet.hardware import classify_machine
from csdctl.fleet.model import Fleet, select_nodes
from csdctl.fleet.openssh import build_ssh_config, list_aliases
from csdctl.job.model import describe_job, load_job
from csdctl.reporting.privacy import PassCounter, count_passes, measure_privacy
from csdctl.reporting.results import RunFollower, RunResults, summarize
from csdctl.reporting.series import SeriesBuilder
from csdctl.runs.directory import EventLog, RunDirectory
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.report import render_report
from csdctl.terminal.streams import document, format_json
from csdctl.tuning.plan import Plan, Predicted, load_plan, save_plan
from csdctl.worker.protocol import events as protocol
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec, RunSpec, Runtime
from csdctl.workflows.train.resume import load_spec
from tests.fuzz.target import Form, Target
from tests.unit.runs.manifests import manifest_of

INVENTORIES = Path(__file__).parents[1] / "unit" / "fleet" / "inventories"
NODES = ("host", "csd0", "csd1")
JOB = b"""\
model: model.py:build
model_args: {input_shape: [64, 64, 3], classes: 10, weights: null}
data:
  public: {path: data/train, on: host}
  private: {path: ~/private, unequal: repeat, noise: {l2_norm_clip: 1.0, noise_multiplier: 8, delta: 1.0e-5}}
  validation: {path: /srv/val}
  image: {shape: [64, 64, 3], fit: crop}
  classes: [cat, dog]
recipe:
  epochs: 10
  learning_rate: 0.1
  warmup_epochs: 0.5
  optimizer: adam
  optimizer_args: {beta_1: 0.9}
  metrics: [accuracy, model.py:metric]
  early_stopping: {patience: 3}
  reduce_on_plateau: {factor: 0.5}
"""
FLEET = b"""\
host: {threads: 4}
network: 10.1.1.0/24
defaults: {user: trainer, key: keys/id, python: /opt/python3, group: [csds], jump: gate}
jump_hosts:
  - {name: gate, address: 192.0.2.1, port: 2222, user: ops}
nodes:
  - {name: "csd[0-7]", address: "10.1.1.[10-17]"}
  - {name: board, address: "fd00::2", jump: "ops@192.0.2.7:22,csd0", group: boards}
"""


def _in_file(content: bytes, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _write_models(directory: Path) -> None:
    (directory / "model.py").write_text("build = metric = print\n")
    with zipfile.ZipFile(directory / "model.keras", "w"):
        pass


def _job(content: bytes, directory: Path) -> None:
    _write_models(directory)
    job = load_job(_in_file(content, directory / "job.yaml"))
    json.dumps(describe_job(job))
    str(job.fingerprint)


def _fleet(content: bytes, directory: Path) -> None:
    fleet = load_fleet(_in_file(content, directory / "fleet.yaml"))
    select_nodes(fleet, [fleet.nodes[0].name])
    build_ssh_config(fleet.nodes, [directory / "known_hosts"])
    (directory / "again.yaml").write_text(render_fleet(fleet, origin="Written again"))
    load_fleet(directory / "again.yaml")


def _plan(content: bytes, directory: Path) -> None:
    plan = load_plan(_in_file(content, directory / "plan.yaml"))
    json.dumps([plan.batch_sizes, plan.global_batch, plan.predicted_samples_per_s, plan.model_dump()])
    str(plan.prediction)


def _plan_seeds() -> list[bytes]:
    ranks: Any = [
        {"node": "host", "batch_size": 64, "threads": 8, "step_time_s": 0.5, "peak_memory_bytes": 1 << 30},
        {"node": "csd0", "batch_size": 8, "threads": 4, "max_batch_size": 64, "micro_batch_size": 4},
    ]
    shares = {"compute_share": 0.8, "imbalance_share": 0.1, "communication_share": 0.1}
    predicted = Predicted(global_batch=72, batch_sizes=[64, 8], step_s=0.5, samples_per_s=144.0, **shares)
    plan = Plan(job="job", job_fingerprint="0" * 16, method="csdctl", ranks=ranks, predicted=predicted)
    return [_written(lambda path: save_plan(path, plan))]


def _written(write: Any) -> bytes:
    """Return what `write` writes to the path that it is given."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "file")
        write(path)
        return path.read_bytes()


def _manifest(content: bytes, directory: Path) -> None:
    run = RunDirectory(directory / "run")
    _in_file(content, run.manifest)
    manifest = run.read_manifest()
    summarize("run", manifest, RunFollower(PassCounter(len(manifest.placed))))
    measure_privacy(manifest, count_passes([], len(manifest.placed)))


def _manifest_seeds() -> list[bytes]:
    noise = {"l2_norm_clip": 1.0, "noise_multiplier": 8.0, "delta": 1e-5}
    return [json.dumps(manifest_of(NODES) | changes).encode() for changes in ({}, {"noise": noise})]


def _run_spec(content: bytes, directory: Path) -> None:
    run = RunDirectory(directory / "run")
    _in_file(content, run.spec)
    json.dumps(dataclasses.asdict(load_spec(run)))


@cache
def run_spec() -> RunSpec:
    """Return a specification as `train` sends it."""
    part = DatasetSlice("a/images.npy", "a/labels.npy", 0, 10, 7, "0" * 64, "0" * 64)
    ranks = tuple(RankSpec(rank, node, 8, Runtime(), part, part, 8, 9) for rank, node in enumerate(NODES))
    noise = Noise(1.0, 8.0, 1e-5)
    return RunSpec("run", "a.json", "a.npz", Recipe(), ranks, part, None, ".csdctl/runs/run", noise=noise)


def _stored_events(content: bytes, directory: Path) -> None:
    run = RunDirectory(directory / "run")
    _in_file(content, run.events)
    run.save_manifest(manifest_of(NODES))
    manifest = run.read_manifest()
    events = run.read_events(NODES)
    series = SeriesBuilder(NODES)
    follower = RunFollower(PassCounter(len(NODES)))
    for time_s, event in run.read_events(NODES).with_times():
        series.add(time_s, event)
        follower.add(event)
    summary = summarize("run", manifest, follower)
    found = RunResults(summary, series.build(), manifest)
    render_report(PrintableConsole(file=io.StringIO(), width=200), found)
    format_json(document("csdctl.report/1", summary, path=str(run.path)))
    count_passes(events, len(NODES)).finish()
    list(events.with_times())


def _event_seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        log = EventLog(run := RunDirectory(Path(directory)))
        for rank, node in enumerate(NODES):
            log.append(1000.5, protocol.Ready(rank, node, 100))
            log.append(1001, protocol.Progress(rank, node, 1, 2, 2, 8, 0.5, 0.1, 0.6))
        log.append(1000.7, protocol.Joined(0, "host", 1, 0, 10, 0, {"0": 4, "1": 4, "2": 4}, is_start=True))
        log.append(
            1002,
            protocol.Joined(0, "host", 1, 5, 10, 5, {"0": 4, "1": 4}, False, ((2, "it is gone"),), 20, 60),
        )
        log.append(1002, protocol.NodeLost(2, "csd1", "it is gone", "look there"))
        log.append(1003, protocol.EpochEnd(0, "host", 1, 10, 40, 1.0, 0.1, 1.1, "0" * 64, 80, 1.5, 0.5))
        log.append(1004, protocol.Traffic(0, "host", ()))
        log.append(1005, protocol.Failed(1, "csd0", "out of memory", "use less"))
        log.append(1006, protocol.Finished(0, "host", 1, 10, "0" * 64, 1 << 30, "model.keras"))
        log.close()
        return [run.events.read_bytes()]


def _facts(content: bytes, directory: Path) -> None:
    fleet = Fleet((), path=directory / "fleet.yaml")
    _in_file(content, facts_path(fleet))
    for facts in load_facts(fleet).values():
        classify_machine(facts)
        str((facts.num_threads, facts.usable_memory_bytes))


def _facts_seeds() -> list[bytes]:
    sizes: dict[str, Any] = {"num_cores": 4, "memory_bytes": 6 << 30, "cpu_limit": 1.5}
    texts: dict[str, Any] = {"architecture": "aarch64", "python_version": "3.11.2", "notes": ("slow",)}
    facts = Facts("csd0", cpu_features=("neon",), **sizes, **texts)
    return [_written(lambda path: save_facts(Fleet((), path=path), {"csd0": facts}).rename(path))]


def _inventory(content: bytes, directory: Path) -> None:
    targets, _ = list_targets(parse_inventory(content.decode(errors="replace"), "hosts.json"), {})
    for target in targets[:20]:
        assert target.words[-2] == "--"


def _ssh_config(content: bytes, directory: Path) -> None:
    list_aliases(_in_file(content, directory / "config"))


SSH_CONFIG = b"""\
Host csd0 csd1 csd*
    HostName 10.1.1.10
    User = trainer
Match host csd1
    IdentityFile ~/.ssh/id
Host "csd 2" !csd3 # a comment
Include no/such/file
"""

TARGETS = (
    Target("job", Form.YAML, _job, (InputError,), lambda: [JOB]),
    Target("fleet", Form.YAML, _fleet, (InputError,), lambda: [FLEET]),
    Target("plan", Form.YAML, _plan, (InputError,), _plan_seeds),
    Target("manifest", Form.JSON, _manifest, (InputError,), _manifest_seeds),
    Target("run-spec", Form.JSON, _run_spec, (InputError,), lambda: [to_json(run_spec()).encode()]),
    Target("stored-events", Form.LINES, _stored_events, (InputError,), _event_seeds),
    Target("facts", Form.JSON, _facts, (InputError,), _facts_seeds),
    Target(
        *("inventory", Form.JSON, _inventory, (InputError,)),
        lambda: [path.read_bytes() for path in sorted(INVENTORIES.glob("*.json"))],
    ),
    Target("ssh-config", Form.LINES, _ssh_config, (InputError,), lambda: [SSH_CONFIG]),
)
