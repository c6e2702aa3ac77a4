"""The ledger of a run, whichever ranks take part in it and however it ends."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.errors import RunError
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.runs.directory import NUM_KILLED, ProjectDirectory
from csdctl.runs.ledger import Ledger, read_ledger
from csdctl.shipping.store import StoredFile
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.events import SAMPLES, SUMS, Event, Finished, Joined, SentBytes, Traffic
from csdctl.workflows.preflight import ranks
from csdctl.workflows.runs.manage import process_of
from csdctl.workflows.train import run as run_module
from csdctl.workflows.train.request import TrainOptions
from csdctl.workflows.train.run import record_process, run_ranks, settle_step_file, store_manifest
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import Workspace
from tests.fake_session import FakeSession
from tests.unit.runs.manifests import spec_of
from tests.unit.workflows.measured_project import MeasuredProject, resolved

ME = (0, HOST_NAME)
NODES = (HOST_NAME, "csd0", "csd1")
FINISHED = Finished(*ME, 1, 10, "hash", 1 << 20)
Script = Sequence[Event | RunError]


class ScriptedSupervisor:
    """In place of a Supervisor: the events of a run, or its end by an error."""

    script: Script
    stopped_by: str = ""
    mpirun_bytes: Mapping[tuple[str, str, str], int] = {}

    def __init__(self, *given: Any) -> None:
        _, _, self._on_event, _ = given

    def run(self) -> None:
        for event in self.script:
            if isinstance(event, RunError):
                raise event
            self._on_event(event)


def joined(*ranks: int, is_start: bool = False) -> Joined:
    return Joined(*ME, 1, 0, 10, 0, {str(rank): 8 for rank in ranks}, is_start)


START = joined(0, 1, 2, is_start=True)


def traffic(num_summed: int, num_samples: int = 0) -> Traffic:
    """Return the bytes that links have sent so far: csd0 to the host, and the host to csd1."""
    sent = [SentBytes(SUMS, 1, 0, num_summed), SentBytes(SAMPLES, 0, 2, num_samples)]
    return Traffic(*ME, tuple(one for one in sent if one.num_bytes))


Run = Callable[..., dict[tuple[str, str, str], int]]


@pytest.fixture
def run(at: MeasuredProject, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script to its end; return the bytes in the ledger by sender, receiver and class."""

    def run_script(script: Script, selected: Fleet | None = None) -> dict[tuple[str, str, str], int]:
        directory = at.project.new_run()
        spec = spec_of(NODES, run_id=directory.run_id)
        ledger = Ledger(at.project.ledger, "train")
        ledger.run = directory.run_id
        # The nodes are away: of them, nothing is sent or started.
        monkeypatch.setattr(ranks, "Supervisor", type("Scripted", (ScriptedSupervisor,), {"script": script}))
        sessions: Any = {HOST_NAME: FakeSession(HOST_NAME)}
        fleet = Fleet((), path=at.fleet.path)
        space = Workspace(at.project, fleet, {}, sessions, ledger, selected=selected)
        try:
            run_ranks(resolved(at, spec, space), spec, directory, TrainOptions(min_nodes=0), EventStream())
        finally:
            ledger.save()
        return {(one.sender, one.receiver, one.kind): one.num_bytes for one in read_ledger(at.project.ledger)}

    return run_script


@pytest.mark.parametrize(
    ("script", "num_summed", "num_samples"),
    [
        ([], 3000, 5),
        ([joined(0, 2)], 3000, 5),
        ([joined(0, 2), traffic(0, 8), joined(0, 1, 2), traffic(700, 9)], 3700, 9),
        ([joined(0, 1, 2, is_start=True), traffic(4000, 6)], 7000, 11),
        ([joined(0, is_start=True), joined(0, 1, 2), traffic(10), joined(0, 2)], 3010, 5),
    ],
)
def test_ledger_has_what_every_link_has_sent(
    run: Run, script: list[Event], num_summed: int, num_samples: int
) -> None:
    """Of each link, the last count: it is of the link since its rank has joined."""
    assert run([START, traffic(1000, 5), traffic(3000, 5), *script, FINISHED]) == {
        ("csd0", "host", TrafficClass.GRADIENT): num_summed,
        ("host", "csd1", TrafficClass.PUBLIC): num_samples,
    }


def test_other_servers_get_the_manifest_and_their_nodes_do_not(
    at: MeasuredProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, list[StoredFile]] = {}

    def note(files: dict[str, list[StoredFile]], *_: object) -> None:
        given.update(files)
        raise RunError("noted")

    monkeypatch.setattr(run_module, "deploy_files", note)
    nodes = (Node("storage1/csd0", "a"), Node("b", "b", server="b"), Node("b/csd0", "c", server="b"))
    for fleet, with_manifest in ((Fleet(nodes), {"b"}), (Fleet(nodes[:1]), set())):
        directory = at.project.new_run()
        directory.save_manifest({"of": directory.run_id})
        space: Any = SimpleNamespace(project=at.project, fleet=fleet, sessions={})
        manifest = store_manifest(directory, space)
        assert bool(manifest) == bool(with_manifest)
        spec = spec_of([HOST_NAME, *(node.name for node in nodes)], manifest=manifest)
        with pytest.raises(RunError, match="noted"):
            run_ranks(resolved(at, spec, space), spec, directory, TrainOptions(), EventStream())
        content = directory.manifest.read_bytes()
        receivers = {
            name
            for name, files in given.items()
            if content in [file.source.read_bytes() for file in files if isinstance(file, StoredFile)]
        }
        assert receivers == with_manifest
        given.clear()


def test_machine_that_a_command_does_without_takes_no_part_though_its_fleet_has_it(run: Run) -> None:
    """As a node to which `tune` could not deliver the check of links."""
    selected = Fleet(tuple(Node(name, name) for name in NODES[1:]))
    assert run([START, traffic(1000, 5), FINISHED], selected) == run([START, traffic(1000, 5), FINISHED])


def test_ledger_has_what_the_ranks_sent_before_a_run_failed(run: Run, at: MeasuredProject) -> None:
    with pytest.raises(RunError, match="disk full"):
        run([START, traffic(1000), RunError("disk full")])
    (entry,) = read_ledger(at.project.ledger)
    assert (entry.sender, entry.kind, entry.num_bytes) == ("csd0", TrafficClass.GRADIENT, 1000)
    assert entry.run == at.project.find_run(None).run_id


def test_state_of_the_last_step_is_kept_until_the_run_is_done(at: MeasuredProject) -> None:
    directory, step_file = at.project.new_run(), at.project.root / "step"
    spec = spec_of(step_file=str(step_file))
    step_file.write_bytes(b"state")
    settle_step_file(directory, spec, is_done=False)
    assert directory.kept_step_file.read_bytes() == b"state"
    assert not step_file.exists()
    step_file.write_bytes(b"state of a later step")
    settle_step_file(directory, spec, is_done=True)
    assert not step_file.exists()
    assert not directory.kept_step_file.exists()


@pytest.mark.parametrize(
    ("error", "state"), [(None, ""), (RunError("disk full"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_process_of_a_run_is_recorded_until_the_machines_are_unlocked_with_its_end(
    tmp_path: Path, error: BaseException | None, state: str
) -> None:
    project = ProjectDirectory(tmp_path)
    run = project.new_run()
    space = Workspace(project, Fleet(()), {}, {}, Ledger(project.ledger, "train"))
    with suppress(RunError, KeyboardInterrupt), space.after:
        record_process(run, space)
        assert process_of(run).is_running
        if error:
            raise error
    assert not process_of(run).is_running
    assert process_of(run).is_alive
    end = run.load_process()
    assert end.get("state", "") == state
    assert end.get("error", "").startswith(str(error or ""))
    assert (space.ledger.run, end[NUM_KILLED]) == (run.run_id, 0)


def test_csdctl_that_was_killed_is_counted(tmp_path: Path) -> None:
    project = ProjectDirectory(tmp_path)
    run = project.new_run()
    for number in (1, 2):
        space = Workspace(project, Fleet(()), {}, {}, Ledger(project.ledger, "train"))
        record_process(run, space)
        assert run.load_process()[NUM_KILLED] == number  # unless its end is recorded
    space.after.close()
    assert run.load_process()[NUM_KILLED] == 1
