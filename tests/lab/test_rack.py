"""Three servers with three nodes each, whose tunnels all have the same addresses, train one model."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.ledger import read_ledger
from csdctl.worker.protocol.run_spec import COPIES
from csdctl.worker.tasks.checkpointer import StepFile
from tests.emulated.training import events_of, find_breaks
from tests.lab import network
from tests.lab.capture import captured
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.project import CSDCTL, Project
from tests.lab.rack import Server, open_rack, use_rack
from tests.lab.test_main_job import last_steps, latest_members, load_events, start_training
from tests.patience import communicate, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.thorough]

WIDE = """\
import keras


def build():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(4000), layers.Dense(2, activation="softmax")]
    )
"""
VECTOR_BYTES = 4 * (64 * 4000 + 4000 + 2 * 4000 + 2)
NUM_STEPS = 20
RANKS = set(range(12))
HOOKS = ("input", "output")
OF_SERVER_2 = {4, 5, 6, 7}
OF_SERVER_3 = {8, 9, 10, 11}


@pytest.fixture(scope="module")
def servers(lab: Lab) -> Iterator[tuple[Server, ...]]:
    with open_rack(lab) as opened:
        yield opened


@pytest.mark.fault(60)
def test_rack_trains_from_discover_to_report(
    project: Project, job: Path, servers: tuple[Server, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    use_rack(project, servers)
    code, machines, errors = project.discover()
    assert code == 0, errors
    assert len(machines) == len(RANKS)
    assert all(machine["problem"] is None for machine in machines.values())

    done = project.succeed("doctor", "--json", "--timeout", "600", "--mpi-timeout", "300")
    checks = json.loads(done.stdout)["checks"]
    assert sum(check["check"] == "link" for check in checks) == len(RANKS) - 1
    (summed,) = (check["found"] for check in checks if check["check"] == "sum")
    assert summed.startswith(f"{len(RANKS)} ranks, ")

    done = project.succeed("verify", str(job), "--batch-size", "8", "--json")
    verified = json.loads(done.stdout)
    assert len(verified["ranks"]) == len(RANKS)
    assert verified["is_equal"]
    assert verified["sum_difference"] < 1e-6

    done = project.succeed("tune", str(job), "--probe-seconds", "0.1", "--json")
    planned = [rank["node"] for rank in json.loads(done.stdout)["ranks"]]
    assert {"host", "storage2", "storage3"} <= set(planned)

    (job.parent / "wide.py").write_text(WIDE)
    wide = job.with_name("wide.yaml")
    wide.write_text(job.read_text().replace("small.py", "wide.py").replace("epochs: 2", "epochs: 100"))
    options = ("--batch-size", "1", "--max-steps", str(NUM_STEPS), "--skip-doctor")
    machines_of_others = [server.machine for server in servers if server.machine]
    with captured(project.lab, *machines_of_others, directory=tmp_path_factory.mktemp("pcap")) as captures:
        project.succeed("train", str(wide), *options)

    (run,) = (project.path / ".csdctl/runs").glob("*")
    hashes = {event["rank"]: event["weights_hash"] for event in events_of(run, "Finished")}
    assert hashes.keys() == RANKS
    assert len(set(hashes.values())) == 1
    gradients = {
        (entry.sender, entry.receiver): entry.num_bytes
        for entry in read_ledger(project.path / ".csdctl/ledger.jsonl")
        if entry.run == run.name and entry.kind == "gradient"
    }
    between = {pair: count for pair, count in gradients.items() if "/" not in "".join(pair)}
    assert between.keys() == {
        *(("host", "storage2"), ("storage2", "host"), ("host", "storage3"), ("storage3", "host"))
    }
    # One vector each way for each of the other servers; a flat star sends one for each of their 8 ranks.
    assert 4 * NUM_STEPS <= sum(between.values()) / VECTOR_BYTES <= 4 * (NUM_STEPS + 1)
    assert len(gradients) == len(between) + 2 * 9
    for server, capture in zip(servers[1:], captures.values(), strict=True):
        payload = capture.payload()
        sent = sum(count for (sender, _), count in payload.items() if sender == server.address)
        assert between[server.name, "host"] <= sent <= between[server.name, "host"] + 12 * VECTOR_BYTES

    done = project.succeed("report", "--privacy")
    assert "between servers in this run, gradient: " in done.stdout


@pytest.mark.fault(59)
def test_rack_survives_the_loss_of_a_node_a_server_and_a_cable(
    project: Project, job: Path, servers: tuple[Server, ...]
) -> None:
    use_rack(project, servers)
    process = start_training(project, job, "--start-timeout", "1200")
    (events,) = (project.path / ".csdctl/runs").glob("*/events.jsonl")

    def wait_until_trained_by(ranks: set[int]) -> None:
        wait_for(lambda: latest_members(events) == ranks, process, project.path)

    wait_until_trained_by(RANKS)
    with servers[2].nodes[0].switched_off():
        wait_until_trained_by(RANKS - {9})
    wait_until_trained_by(RANKS)
    machine = servers[1].machine
    assert machine
    with machine.cable_pulled():
        wait_until_trained_by(RANKS - OF_SERVER_2)
    wait_until_trained_by(RANKS)
    with servers[2].switched_off():
        wait_until_trained_by(RANKS - OF_SERVER_3)
    wait_until_trained_by(RANKS)
    printed = project.interrupt(process)
    for words in ("storage3/csd0 is lost", "storage2 is lost", "storage3 is back"):
        assert words in printed
    assert len(find_breaks(events.parent)) >= 3
    # The others lose no step.
    places = [
        (event["epoch"], event["step"])
        for event in load_events(events)
        if event["rank"] == 0 and event["event"] in ("Joined", "Progress")
    ]
    assert places == sorted(places)


def saved_steps(step_file: Path) -> int:
    """Return the steps of the run after which its state was last saved."""
    content, mark = step_file.read_bytes(), StepFile._MARK
    return max(mark.unpack_from(content, start)[0] for start in (0, len(content) // 2)) // 2


def csdctl_on(machine: LabNode, lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run csdctl on a server, in ~/project there."""
    environment = lab.host.environment() | {"HOME": "/root", "TMPDIR": "/tmp"}
    command = ["nsenter", "-t", str(machine.first_process()), "--all", "env", "-C", "/root/project"]
    process = subprocess.Popen(
        [*network.DIES_WITH_PARENT, *command, str(CSDCTL), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    stdout, stderr = communicate(process, machine.home / "project")
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


@contextmanager
def host_off(lab: Lab) -> Iterator[None]:
    """The host sends and receives nothing, not even the end of a connection; its switch works."""
    nft = ("nsenter", f"--net={network.NAMESPACES / lab.host.namespace}", "nft", "-f", "-")
    chains = (f"chain {hook} {{ type filter hook {hook} priority 0; policy drop; }}" for hook in HOOKS)
    network.run_command(*nft, input_text="table inet off {\n" + "\n".join(chains) + "\n}\n")
    try:
        yield
    finally:
        network.run_command(*nft, input_text="delete table inet off\n")


@pytest.mark.fault(61)
def test_another_server_continues_when_the_one_of_csdctl_is_off(
    project: Project, job: Path, servers: tuple[Server, ...]
) -> None:
    """Its locks on the other machines stay until a person has them removed."""
    use_rack(project, servers)
    process = start_training(project, job, "--start-timeout", "1200")
    (path,) = (project.path / ".csdctl/runs").glob("*")
    wait_for(lambda: latest_members(path / "events.jsonl") == RANKS, process, project.path)
    wait_for(lambda: len(events_of(path, "EpochEnd")) > 10 * len(RANKS), process, project.path)
    machine, third = servers[1].machine, servers[2].machine
    assert machine
    assert third
    there = machine.home / "project"
    shutil.copytree(job.parent, there)
    (there / ".csdctl").mkdir(mode=0o700)
    for name in ("fleet.yaml", ".csdctl/known_hosts"):
        shutil.copyfile(project.path / name, there / name)
    with host_off(project.lab):
        network.end_all(lambda: network.list_processes(project.lab.host.namespace))
        process.communicate()
        steps = saved_steps(ProjectDirectory(project.path).step_file(RunDirectory(path)))
        options = ("--resume", "latest", "--exclude", "storage1", "--max-steps", str(steps + 5))
        command = ("train", "pausing.yaml", *options, "--skip-doctor")
        done = csdctl_on(machine, project.lab, *command)
        assert f"run {path.name} is taken over from storage1: storage2 is the host" in done.stdout
        assert done.returncode == 6, done.stdout + done.stderr
        assert "another csdctl is running here: `csdctl train`" in done.stderr
        done = csdctl_on(machine, project.lab, "clean", "--kill", "--exclude", "storage1")
        assert done.returncode == 0, done.stdout + done.stderr
        done = csdctl_on(machine, project.lab, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory(there / ".csdctl/runs" / path.name)
    stored, events = run.read_events(run.read_manifest().nodes), run.events
    assert len([*stored]) > 8
    assert stored.num_breaks == 0
    joined = next(event for event in load_events(events) if event["event"] == "Joined")
    assert steps - 1 <= joined["total_steps"] <= steps + 1
    assert {int(rank) for rank in joined["batch_sizes"]} == {0, 5, 6, 7} | OF_SERVER_3
    assert last_steps(events) == steps + 5
    finished = events_of(events.parent, "Finished")
    assert len(finished) == 8
    assert len({event["weights_hash"] for event in finished}) == 1
    assert not [path for server in (machine, third) for path in (server.home / COPIES).rglob("*.json")]
