"""Finding the run to resume, recognizing one that is complete, and refusing one that has changed.

Another server takes over a run: its state, and the run as its csdctl has it.
"""

import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, Node
from csdctl.job.model import Data, HostData, Job, PrivateData
from csdctl.placement.equation1 import steps_per_epoch
from csdctl.runs.directory import LATEST, Manifest, ProjectDirectory, RunDirectory
from csdctl.shipping.store import StoredFile
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.events import EARLY_STOPPING, STOPPED, CheckpointSaved, Event, Finished, Joined
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import COPIES
from csdctl.workflows.data.files import SerializedModel, whole
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train import train as resume_module
from csdctl.workflows.train.request import TrainOptions
from csdctl.workflows.train.resolved import RunContext, build_rank_specs
from csdctl.workflows.train.resume import find_resumable, is_complete, load_spec, take_over, with_host
from csdctl.workflows.train.strategies import strategy_of
from csdctl.workflows.train.train import resume
from csdctl.workflows.workspace.event_stream import EventStream
from tests.unit.runs.manifests import manifest_of, spec_of, write_events
from tests.unit.workflows.measured_project import write_job

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")))
JOINED = Joined(0, "host", 1, 0, 10, 0, {"0": 4}, is_start=True)
FINISHED = Finished(0, "host", 3, 30, "hash", 1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return write_job(tmp_path)


@pytest.fixture
def run(tmp_path: Path, job: Job) -> RunDirectory:
    """A run of the host, csd0 and csd7."""
    run = ProjectDirectory(tmp_path).new_run()
    run.save_manifest(manifest_of(["host", "csd0", "csd7"], job.name))
    return run


def test_latest_run_is_found_and_nodes_that_do_not_take_part_are_reported(
    tmp_path: Path, run: RunDirectory, job: Job
) -> None:
    messages: list[str] = []
    assert find_resumable(ProjectDirectory(tmp_path), LATEST, job, FLEET, messages.append) == run
    assert messages[0].startswith("resuming without csd7")
    assert messages[1].startswith("csd1 did not take part")


def test_run_of_another_job_is_rejected(tmp_path: Path, run: RunDirectory, job: Job) -> None:
    run.save_manifest(manifest_of(job="other"))
    with pytest.raises(InputError, match=r"belongs to job other, not to job") as refused:
        find_resumable(ProjectDirectory(tmp_path), run.run_id, job, FLEET, print)
    assert "the job file of other" in refused.value.remedy


def write_archive(path: Path) -> Path:
    """Write what stands for a saved model: all of it is a zip archive."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}" * 100)
    return path


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([JOINED], False),
        ([JOINED, FINISHED], True),
        ([JOINED, replace(FINISHED, epochs=2)], False),
        ([JOINED, replace(FINISHED, epochs=1, reason=EARLY_STOPPING)], True),
        ([JOINED, replace(FINISHED, reason=STOPPED)], False),
        ([JOINED, FINISHED, JOINED], False),
        ([JOINED, FINISHED, replace(JOINED, rank=1)], True),
    ],
)
def test_run_is_complete_when_rank_0_has_finished_all_epochs_or_stopped_early(
    run: RunDirectory, job: Job, events: list[Event], expected: bool
) -> None:
    write_archive(run.model)
    assert is_complete(write_events(run, events), job) is expected


@pytest.mark.parametrize("finished", [FINISHED, replace(FINISHED, epochs=1, reason=EARLY_STOPPING)])
def test_completed_run_without_its_whole_model_is_resumed_which_saves_it_again(
    run: RunDirectory, job: Job, finished: Finished
) -> None:
    write_events(run, [JOINED, finished])
    assert not is_complete(run, job)
    os.mkfifo(run.model)
    assert not is_complete(run, job)
    run.model.unlink()
    os.truncate(write_archive(run.model), 100)
    assert not is_complete(run, job)
    run.model.with_suffix(".weights.h5").touch()
    assert is_complete(run, job)
    run.process.write_text('{"state": "stopped"}')  # the events say otherwise: they may be of another run
    assert not is_complete(run, job)


def test_spec_of_a_newer_csdctl_is_said_to_be_so(run: RunDirectory) -> None:
    run.spec.write_text(to_json(spec_of(run_id=run.run_id)).replace('"schema":2', '"schema":3'))
    with pytest.raises(InputError, match="spec.json was written by a newer csdctl") as raised:
        load_spec(run)
    assert raised.value.remedy == "update this csdctl"


def test_latest_run_that_has_started_its_ranks_is_resumed(
    tmp_path: Path, run: RunDirectory, job: Job
) -> None:
    """A kill leaves a directory without manifest or, after minutes of computing features, without spec."""
    run.spec.write_text(to_json(spec_of(run_id=run.run_id)))
    project = ProjectDirectory(tmp_path)
    killed = [project.new_run(), project.new_run()]
    killed[0].save_manifest(manifest_of(job=job.name))
    messages: list[str] = []
    assert find_resumable(project, LATEST, job, FLEET, messages.append) == run
    for one, file, message in zip(reversed(killed), ("manifest.json", "spec.json"), messages, strict=False):
        assert f"{one.run_id} is skipped: {one.path / file} does not exist" in message


@pytest.mark.parametrize("name", ["step.state", "checkpoints/step-00000010.npz"])
def test_run_of_which_no_state_is_left_is_refused_unless_it_has_saved_none(
    run: RunDirectory, job: Job, name: str
) -> None:
    saved = CheckpointSaved(0, "host", 1, 10, "a path")
    write_events(run, [JOINED, saved])
    with pytest.raises(InputError, match="no state of run .* is left") as refused:
        is_complete(run, job)
    assert "restore them from a copy, or start a new run" in refused.value.remedy
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).write_bytes(b"")  # whether it is whole is looked at later
    assert not is_complete(run, job)
    (run.path / name).unlink()
    with pytest.raises(InputError, match="no state of run .* is left"):
        is_complete(write_events(run, [FINISHED]), job)
    write_archive(run.model)
    assert is_complete(run, job)
    run.events.unlink()
    assert not is_complete(write_events(run, [JOINED]), job)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ({"schema": 1}, "received schema 1, expected"),
        ({"num_checkpoints": "many"}, "num_checkpoints: .*received 'many'"),
        ({"ranks": 5}, "ranks: expected a list"),
        ({"recipe": None}, "expected a Recipe"),
        ({"output_directory": ["a"]}, "output_directory: expected text"),
        *((text, "") for text in ("", "[]", "null", "[" * 100_000, "\x00")),
    ],
)
def test_damaged_spec_is_refused(run: RunDirectory, edit: dict[str, object] | str, problem: str) -> None:
    spec = json.loads(to_json(spec_of(run_id=run.run_id)))
    run.spec.write_text(edit if isinstance(edit, str) else json.dumps(spec | edit))
    with pytest.raises(InputError, match=f"spec.json.*{problem}") as raised:
        load_spec(run)
    assert raised.value.remedy == "start a new run" or isinstance(edit, str)


NOISE = Noise(1.0, 1.1, 1e-5)
FILE = StoredFile("ab" * 32 + ".npy", Path("file"), 0, traffic_class=TrafficClass.PUBLIC)
PUBLIC = DatasetInfo("data/public", 300, (4, 4, 1), "uint8", (), 9, "f" * 32)
PRIVATE = DatasetInfo("data/private", 20, (4, 4, 1), "uint8", (), 9, "e" * 32)


class TrainedRun:
    """A run of the host, csd0 and csd7 with noise on private samples, of which csd7 is not there now."""

    def __init__(self, run: RunDirectory, job: Job) -> None:
        self.run = run
        # Nodes that see all public samples need no shards.
        data = Data(HostData(job.data.public.path, "every-node"), PrivateData("/data/private", noise=NOISE))
        self.job = replace(job, data=data)
        info = ModelInfo("m", {"": (4, 4, 1)}, 7, 7, recipe=job.recipe)
        self.prepared = Prepared(FILE, SerializedModel(info, FILE, FILE), PUBLIC, None, {"csd0": PRIVATE})
        manifest = run.load_manifest()
        manifest["data"]["private"] = {"csd0": PRIVATE.fingerprint, "csd7": "d" * 32}
        run.save_manifest(manifest)
        placed = Manifest.model_validate(run.load_manifest())
        ranks = build_rank_specs(placed.plan.ranks, placed.placed, self.prepared, {}, self.job)
        self.spec = replace(spec_of(run_id=run.run_id), recipe=job.recipe, noise=NOISE, ranks=ranks)

    def with_recipe(self, **changes: Any) -> Prepared:
        info = self.prepared.model.info
        changed = replace(info, recipe=replace(info.recipe, **changes))
        return replace(self.prepared, model=replace(self.prepared.model, info=changed))

    def resume(self, job: Job, prepared: Prepared, options: TrainOptions) -> None:
        project = ProjectDirectory(self.run.path.parents[2])
        space: Any = SimpleNamespace(fleet=FLEET, project=project, ledger=SimpleNamespace())
        space.after = ExitStack()
        context = RunContext(job, prepared, space, EventStream((print,)))
        resume(self.run, strategy_of(load_spec(self.run)), context, options)

    def assert_refused(
        self, problem: str, *, job: Job | None = None, prepared: Prepared | None = None, **edit: Any
    ) -> InputError:
        """Resume with this job, this data and a spec.json that was edited; `problem` is the reason."""
        self.run.spec.write_text(to_json(replace(self.spec, **edit)))
        with pytest.raises(InputError, match=problem) as raised:
            self.resume(job or self.job, prepared or self.prepared, TrainOptions())
        assert "start a new run" in raised.value.remedy
        return raised.value


@pytest.fixture
def trained(run: RunDirectory, job: Job) -> TrainedRun:
    return TrainedRun(run, job)


@pytest.mark.parametrize(
    ("public", "private", "problem"),
    [
        ({"fingerprint": "0" * 32}, {}, "changed since run .* began: public data"),
        ({}, {"csd0": "0" * 32}, "changed since run .* began: private data of csd0"),
        ({"num_samples": 301}, {}, "`placed` divides 300 public samples, there are 301"),
    ],
)
def test_run_whose_data_has_changed_is_refused(
    trained: TrainedRun, public: dict[str, Any], private: dict[str, str], problem: str
) -> None:
    changed = {name: replace(PRIVATE, fingerprint=fingerprint) for name, fingerprint in private.items()}
    prepared = replace(
        trained.prepared, public=replace(PUBLIC, **public), private={"csd0": PRIVATE} | changed
    )
    trained.assert_refused(problem, prepared=prepared)


@pytest.mark.parametrize(("now", "is_same"), [("a", True), ("b", False), ("", False)])
def test_public_data_of_another_server_is_that_of_the_run_if_it_has_the_same_bytes(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch, now: str, is_same: bool
) -> None:
    """Its path, and the times of its files, are part of the fingerprint."""
    started: list[Any] = []
    monkeypatch.setattr(resume_module, "run_to_end", lambda *given: started.append(given))
    before = whole(replace(PUBLIC, images_sha256="a" if now else "", labels_sha256="c" if now else ""))
    trained.run.spec.write_text(to_json(replace(trained.spec, public=before)))
    hashes = {"images_sha256": now, "labels_sha256": before.labels_sha256}
    prepared = replace(trained.prepared, public=replace(PUBLIC, fingerprint="0" * 32, **hashes))
    with (
        nullcontext()
        if is_same
        else pytest.raises(InputError, match="changed since run .* began: public data")
    ):
        trained.resume(trained.job, prepared, TrainOptions())
    assert bool(started) == is_same


@pytest.mark.parametrize("architecture", [FILE.path, ".csdctl/objects/other.json"])
def test_model_that_has_changed_is_told(
    trained: TrainedRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
) -> None:
    """Such as another rate of dropout, with which all shapes are the same."""
    monkeypatch.setattr(resume_module, "run_to_end", lambda *given: None)
    trained.run.spec.write_text(to_json(replace(trained.spec, architecture=architecture)))
    trained.resume(trained.job, trained.prepared, TrainOptions())
    is_told = "warning: the model or the job's own code has changed" in capsys.readouterr().out
    assert is_told == (architecture != FILE.path)


def test_renamed_run_is_told(trained: TrainedRun) -> None:
    trained.run.spec.write_text(to_json(replace(trained.spec, run_id=trained.run.run_id)))
    renamed = RunDirectory(trained.run.path.rename(trained.run.path.parent / "my-best"))
    with pytest.raises(InputError, match=f"spec.json is of run {trained.run.run_id}") as caught:
        load_spec(renamed)
    assert caught.value.remedy == "if the run's directory was renamed, rename it back"


@pytest.mark.parametrize("change", [{"learning_rate": 0.2}, {"seed": 1}, {"optimizer": "adam"}])
def test_run_whose_recipe_has_changed_is_refused(trained: TrainedRun, change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    problem = f"job.yaml and the recipe of run .* differ: {name} is {value}, was "
    error = trained.assert_refused(problem, prepared=trained.with_recipe(**change))
    assert error.remedy.startswith("undo the change (epochs may be raised)")


@pytest.mark.parametrize(
    ("noise", "before", "problem"),
    [
        (None, NOISE, "absent, that of run .* {'l2_norm_clip': 1.0"),
        (replace(NOISE, noise_multiplier=0.1), NOISE, ".*0.1,.*, that of run .* {'l2_norm_clip': 1.0"),
        (NOISE, None, "{.*that of run .* absent"),
    ],
)
def test_run_with_other_noise_is_refused(
    trained: TrainedRun, noise: Noise | None, before: Noise | None, problem: str
) -> None:
    data = replace(trained.job.data, private=PrivateData("/data/private", noise=noise))
    job = replace(trained.job, data=data)
    trained.assert_refused(f"data.private.noise of .* is {problem}", job=job, noise=before)


def test_resumed_run_has_its_shards_and_noise_and_the_epochs_and_options_of_today(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No path of spec.json is used."""
    started: list[Any] = []
    monkeypatch.setattr(resume_module, "run_to_end", lambda *given: started.append(given))
    trained.run.spec.write_text(to_json(replace(trained.spec, num_checkpoints=5, is_balanced=False)))
    options = TrainOptions(max_steps=7, checkpoint_interval_s=30)
    trained.resume(trained.job, trained.with_recipe(epochs=30), options)
    ((resolved, spec, *_),) = started
    assert (spec.run_id, spec.ranks, spec.noise) == (trained.run.run_id, trained.spec.ranks, NOISE)
    assert (spec.recipe.epochs, spec.max_steps, spec.checkpoint_interval_s) == (30, 7, 30), "as given"
    assert (spec.num_checkpoints, spec.is_balanced) == (5, False), "as it began"
    assert (spec.architecture, spec.weights) == (FILE.path, FILE.path)
    assert spec.output_directory.endswith(trained.run.run_id)
    assert steps_per_epoch(resolved.data.placed) == 25


NODES = ["host", "storage1/csd0", "storage2", "storage2/csd0", "storage3"]
AT_STORAGE2 = ["host", "storage1/csd0", "storage1", "storage2/csd0", "storage3"]


def nodes_of(run: RunDirectory) -> list[str]:
    """Return the machines of the ranks, after a check of the manifest."""
    manifest = Manifest.model_validate(run.load_manifest())
    return [rank.node for rank in manifest.plan.ranks]


class Servers:
    """Project and home of this server."""

    def __init__(self, directory: Path) -> None:
        self.home, self.said = directory / "home", list[str]()
        self.project = ProjectDirectory(directory / "project")
        self.copies = ProjectDirectory(self.home / COPIES)

    def copy(self, run_id: str, server: str = "storage1", state: bytes = b"state") -> RunDirectory:
        """Write what the rank of this server keeps of a run of csdctl on `server`."""
        run = RunDirectory(self.copies.runs / run_id)
        run.path.mkdir(parents=True)
        run.save_manifest(manifest_of(NODES if server == "storage1" else AT_STORAGE2) | {"server": server})
        run.spec.write_text(to_json(spec_of(run_id=run_id)))
        if state:
            self.copies.step_file(run).write_bytes(state)
        return run

    def take_over(self, run_id: str, server: str = "storage2") -> RunDirectory:
        take_over(self.project, run_id, server, self.home, self.said.append)
        return self.project.find_run(run_id)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    for run_id in ("a1", "a2", "b1"):
        servers.copies.step_file(RunDirectory(Path(run_id))).unlink(missing_ok=True)


@pytest.mark.needs("shared memory")
class TestTakeover:
    @pytest.mark.parametrize("given", ["b1", "b", LATEST])
    def test_run_is_moved_into_the_project_with_its_state(self, servers: Servers, given: str) -> None:
        servers.project.runs.joinpath("a1").mkdir(parents=True)
        copy = servers.copy("b1")
        run = servers.take_over(given)
        assert run.kept_step_file.read_bytes() == b"state"
        assert json.loads(run.spec.read_text())["run_id"] == "b1"
        assert nodes_of(run) == AT_STORAGE2
        assert servers.said == ["run b1 is taken over from storage1: storage2 is the host"]
        assert not copy.path.exists()
        assert not servers.copies.step_file(copy).exists()
        assert nodes_of(servers.take_over(given)) == AT_STORAGE2, "once"
        assert len(servers.said) == 1

    def test_run_returns_to_the_server_that_it_came_from_with_its_later_state(self, servers: Servers) -> None:
        run = RunDirectory(servers.project.runs / "b1")
        run.path.mkdir(parents=True)
        run.save_manifest(manifest_of(NODES) | {"server": "storage1"})
        run.kept_step_file.write_bytes(b"of an earlier step")
        servers.copy("b1", "storage2")
        assert servers.take_over(LATEST, "storage1") == run
        assert run.kept_step_file.read_bytes() == b"state"
        assert nodes_of(run) == NODES

    def test_run_in_a_directory_that_both_servers_see_is_taken_over_without_a_copy(
        self, servers: Servers
    ) -> None:
        run = RunDirectory(servers.project.runs / "b1")
        run.path.mkdir(parents=True)
        run.save_manifest(manifest_of(NODES) | {"server": "storage1"})
        assert nodes_of(servers.take_over("b1")) == AT_STORAGE2
        assert nodes_of(servers.take_over("b1", "storage1")) == NODES

    def test_other_runs_stay_as_they_are(self, servers: Servers) -> None:
        """A later one of the project, that of one server alone, and one without a rank on this server."""
        servers.copy("a1")
        run = RunDirectory(servers.project.runs / "b1")
        run.path.mkdir(parents=True)
        run.save_manifest(manifest_of(NODES))
        assert servers.take_over(LATEST, "storage9") == run
        assert nodes_of(run) == NODES
        assert servers.copies.run_ids() == ["a1"]
        take_over(servers.project, "a1", "", servers.home, print)
        assert servers.project.run_ids() == ["b1"]
        with pytest.raises(InputError, match="no run 'c'"):
            servers.take_over("c")

    def test_copy_whose_state_is_gone_is_refused(self, servers: Servers) -> None:
        servers.copy("a2", state=b"")
        with pytest.raises(
            InputError, match=r"found no state of run a2 in /dev/shm/csdctl-\d+/\w{12}-a2 that"
        ):
            servers.take_over("a2")


def test_ranks_keep_their_numbers_and_batch_sizes_and_machines_their_settings() -> None:
    """A batch that is too large for the new host is computed in micro-batches."""
    manifest = manifest_of(NODES) | {"server": ""}
    ranks = manifest["plan"]["ranks"]
    ranks[0] |= {"batch_size": 64, "threads": 16}
    ranks[2] |= {"batch_size": 8, "threads": 4, "max_batch_size": 24}
    for number, size in ((0, 64), (2, 8)):
        manifest["placed"][number]["batch_size"] = size
    host, _, former, *_ = Manifest.model_validate(with_host(manifest, "storage2")).plan.ranks
    assert (host.node, host.batch_size, host.threads, host.micro_batch_size) == ("host", 64, 4, 24)
    assert (former.node, former.batch_size, former.threads) == ("former-host", 8, 16)
    assert former.micro_batch_size is None
