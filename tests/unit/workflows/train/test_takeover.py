"""Another server takes over a run: its state, and the run as its csdctl has it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.runs.directory import LATEST, Manifest, ProjectDirectory, RunDirectory
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import COPIES
from csdctl.workflows.train.resume import take_over, with_host
from tests.unit.runs.manifests import manifest_of, spec_of

NODES = ["host", "storage1/csd0", "storage2", "storage2/csd0", "storage3"]
AT_STORAGE2 = ["host", "storage1/csd0", "storage1", "storage2/csd0", "storage3"]
pytestmark = pytest.mark.needs("shared memory")


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


@pytest.mark.parametrize("given", ["b1", "b", LATEST])
def test_run_is_moved_into_the_project_with_its_state(servers: Servers, given: str) -> None:
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


def test_run_returns_to_the_server_that_it_came_from_with_its_later_state(servers: Servers) -> None:
    run = RunDirectory(servers.project.runs / "b1")
    run.path.mkdir(parents=True)
    run.save_manifest(manifest_of(NODES) | {"server": "storage1"})
    run.kept_step_file.write_bytes(b"of an earlier step")
    servers.copy("b1", "storage2")
    assert servers.take_over(LATEST, "storage1") == run
    assert run.kept_step_file.read_bytes() == b"state"
    assert nodes_of(run) == NODES


def test_run_in_a_directory_that_both_servers_see_is_taken_over_without_a_copy(servers: Servers) -> None:
    run = RunDirectory(servers.project.runs / "b1")
    run.path.mkdir(parents=True)
    run.save_manifest(manifest_of(NODES) | {"server": "storage1"})
    assert nodes_of(servers.take_over("b1")) == AT_STORAGE2
    assert nodes_of(servers.take_over("b1", "storage1")) == NODES


def test_other_runs_stay_as_they_are(servers: Servers) -> None:
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


def test_copy_whose_state_is_gone_is_refused(servers: Servers) -> None:
    servers.copy("a2", state=b"")
    with pytest.raises(InputError, match=r"found no state of run a2 in /dev/shm/csdctl-\d+/\w{12}-a2 that"):
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
