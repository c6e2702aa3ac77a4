"""FAULTS 1–24: connections to real SSH servers that misbehave, and commands that lose their machine."""

import re
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import CsdctlError, DeadlineError, UnreachableError
from csdctl.transport.ssh import DEAD_PEER_S, KEEPALIVE_INTERVAL_S, SshSession, connect
from tests.lab import network
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.network import run_command
from tests.lab.project import Project
from tests.patience import communicate, eventually, scaled
from tests.started_programs import COMMAND, ENVIRONMENT

pytestmark = pytest.mark.lab

Machines = dict[str, dict[str, Any]]

VISIT_MANY = """
import resource, sys
from pathlib import Path
from csdctl.fleet.model import Fleet, Node
from csdctl.transport.many import run_on_nodes
key, count = sys.argv[1:]
nodes = tuple(Node(f"n{i}", f"10.78.{i // 250}.{1 + i % 250}", key=Path(key)) for i in range(int(count)))
outcomes = run_on_nodes(
    Fleet(nodes), lambda session: session.run(["hostname"]).output.strip(),
    directory=Path.cwd(), connect_deadline_s=60,
)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == 256
errors = [str(outcome.error) for outcome in outcomes.values() if outcome.error]
print(len(outcomes), {outcome.value for outcome in outcomes.values()}, *errors[:3])
"""


@contextmanager
def session_to(lab: Lab, node: LabNode) -> Iterator[SshSession]:
    known_hosts = lab.directory / f"known_hosts-{node.name}"
    known_hosts.write_text(node.known_hosts_line)
    with network.entered(lab.host.namespace):
        session = connect(node.node, [known_hosts])
        try:
            yield session
        finally:
            session.close()


def make_key(path: Path, passphrase: str = "") -> Path:
    run_command("ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path))
    return path


@pytest.fixture(scope="module")
def discovered(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Machines, str]:
    """One `discover` of a fleet in which every node except one has a fault."""
    project = Project(lab, tmp_path_factory.mktemp("sick"))
    well, second, stopped = lab.near
    with ExitStack() as stack:
        deaf = stack.enter_context(lab.node("deaf", 40))
        stranger = stack.enter_context(lab.node("stranger", 41))
        changed = stack.enter_context(lab.node("changed", 42))
        off = stack.enter_context(lab.node("off", 43))
        project.trust(well, second, stopped, deaf, changed, off)
        stack.enter_context(changed.another_host_key())
        stack.enter_context(deaf.packets_swallowed())
        stack.enter_context(stopped.server_stopped())
        off.power_off()
        nodes = [
            well.node,
            replace(second.node, name="closed", port=23),
            replace(second.node, name="wrong-key", key=make_key(project.path / "wrong")),
            replace(second.node, name="locked-key", key=make_key(project.path / "locked", "secret")),
            replace(stopped.node, name="stopped"),
            *(node.node for node in (deaf, stranger, changed, off)),
        ]
        project.write_fleet(*nodes)
        return project.discover()


def test_healthy_nodes_continue_and_the_result_is_partial(discovered: tuple[int, Machines, str]) -> None:
    code, machines, errors = discovered
    assert code == 3
    assert "--failed-from" in errors
    assert machines["csd0"]["problem"] is None
    assert machines["csd0"]["tensorflow_version"]


@pytest.mark.fault(1)
@pytest.mark.fault(2)
@pytest.mark.fault(3)
@pytest.mark.fault(4)
@pytest.mark.fault(5)
@pytest.mark.fault(6)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("closed", ["port 23 cannot be reached .Connection refused", "check that an SSH server runs there"]),
        ("deaf", ["does not respond within 10 s"]),
        ("off", ["No route to host|not answer"]),
        ("stopped", ["accepts connections but its SSH server did not respond within 10 s"]),
        ("stranger", ["is unknown: ssh-ed25519 SHA256:", "csdctl trust --limit stranger"]),
        ("changed", ["has changed: received ssh-ed25519 SHA256:"]),
        ("wrong-key", ["accepts none of the offered keys for user 'root'"]),
        ("locked-key", ["has a passphrase, and csdctl never prompts", "ssh-add"]),
    ],
)
def test_fault_of_a_node_is_named_with_a_remedy(
    discovered: tuple[int, Machines, str], name: str, words: list[str]
) -> None:
    _, machines, _ = discovered
    assert machines[name]["remedy"]
    for pattern in words:
        assert re.search(pattern, f"{machines[name]['problem']} → {machines[name]['remedy']}")


@pytest.mark.fault(7)
def test_right_key_is_found_behind_twenty_in_the_agent(project: Project) -> None:
    lab = project.lab
    node = lab.near[0]
    project.trust(node)
    (project.path / "fleet.yaml").write_text(
        f"nodes: [{{name: csd0, address: {node.node.address}, python: {sys.executable}}}]\n"
    )
    place = str(project.path / "agent")
    agent = lab.host.start("ssh-agent", "-D", "-a", place, cwd=project.path)
    try:
        assert eventually(Path(place).exists)
        keys = [str(make_key(project.path / f"id{number}")) for number in range(20)]
        environment = {"SSH_AUTH_SOCK": place}
        for key in (*keys, str(lab.key)):
            lab.host.run("ssh-add", "-q", key, cwd=project.path, environment=environment)
        project.succeed("discover", environment=environment)
    finally:
        agent.kill()
        agent.communicate()


@pytest.mark.fault(8)
def test_dropped_connections_are_retried(project: Project) -> None:
    node = project.lab.near[0]
    project.use(node)
    with node.with_sshd("MaxStartups 1:100:1"), network.entered(project.lab.host.namespace):
        holder = socket.create_connection((node.node.address, 22))
        holder.recv(4)
        process = project.start("discover")
        dropped = ("past MaxStartups", "drop connection")
        assert eventually(lambda: any(words in node.log for words in dropped)), node.log
        holder.close()
        output, _ = communicate(process, project.path)
    assert process.returncode == 0, output


@pytest.mark.fault(9)
@pytest.mark.parametrize("num_sessions", [1, 2])
def test_commands_above_the_sessions_of_a_connection_run_on_others(lab: Lab, num_sessions: int) -> None:
    node = lab.near[0]
    with (
        node.with_sshd(f"MaxSessions {num_sessions}"),
        session_to(lab, node) as session,
        ThreadPoolExecutor(6) as pool,
    ):
        before = session.meter.num_received
        script = ["sh", "-c", "head -c 100000 /dev/zero; sleep 0.2"]
        runs = [pool.submit(session.run, script, deadline_s=scaled(30)) for _ in range(6)]
        assert [len(run.result().stdout) for run in runs] == [100_000] * 6
        assert session.meter.num_received - before > 600_000  # on all connections
        hanging = pool.submit(session.run, ["sleep", "1000"], deadline_s=1)
        with pytest.raises(DeadlineError, match="it was ended"):
            hanging.result()
    assert eventually(lambda: node.commands() == []), node.commands()


@pytest.mark.fault(11)
@pytest.mark.parametrize("server", ["openssh without SFTP", "dropbear"])
def test_server_without_sftp_takes_commands_and_files(project: Project, server: str) -> None:
    content = bytes(range(256)) * 4096
    (project.path / "tree").mkdir()
    (project.path / "tree" / "it is").write_bytes(content)
    server_program = "dropbear" if server == "dropbear" else "openssh"
    with project.lab.node("plain", 44, server=server_program, has_sftp=False) as node:
        project.use(node)
        project.succeed("deploy", "--tree", "tree:there")
        assert node.run("cksum", "/root/there/it is").split()[1] == str(len(content))
        assert project.discover()[0] == 0


@pytest.mark.fault(12)
def test_output_of_a_start_up_file_is_not_taken_for_a_response(project: Project) -> None:
    noise = "echo welcome; echo csdctl is watched >&2; printf 'no line end'; printf '\\377\\0' >&2\n"
    with project.lab.node("noisy", 45, start_up=noise) as node:
        project.use(node)
        code, machines, errors = project.discover()
        assert code == 0, errors
        assert machines["noisy"]["problem"] is None
        assert machines["noisy"]["python_version"].startswith("3.")


@pytest.mark.fault(13)
@pytest.mark.fault(15)
def test_ipv6_odd_ports_and_one_machine_listed_twice(project: Project) -> None:
    with project.lab.node("six", 46, is_ipv6=True, port=2222, sshd=("Port 2222", "Port 2223")) as node:
        twin = replace(node.node, name="twin", port=2223)
        project.write_fleet(node, twin)
        address = node.node.address
        (project.path / ".csdctl").mkdir()
        (project.path / ".csdctl/known_hosts").write_text(
            "".join(f"[{address}]:{port} {node.public_key}" for port in (2222, 2223))
        )
        done = project.succeed("discover")
        assert re.search("warning: (six, twin|twin, six) have the same host key SHA256:", done.stdout)


@pytest.mark.fault(14)
def test_more_nodes_than_open_files_are_handled(lab: Lab, tmp_path: Path) -> None:
    count = 300
    with lab.node("many", 47) as node:
        network.run_ip(node.namespace, "route add local 10.78.0.0/22 dev lo")
        network.run_ip(lab.host.namespace, f"route add 10.78.0.0/22 via {node.node.address}")
        (tmp_path / ".csdctl").mkdir()
        (tmp_path / ".csdctl" / "known_hosts").write_text(f"10.78.* {node.public_key}")
        program = ["sh", "-c", 'ulimit -Sn 256 && ulimit -Hn 256 && exec "$@"', "sh", sys.executable, "-c"]
        arguments = [VISIT_MANY, str(lab.key), str(count)]
        done = lab.host.run(*program, *arguments, cwd=tmp_path)
        network.run_ip(lab.host.namespace, "route del 10.78.0.0/22")
    assert done.stdout.strip() == f"{count} {{'many'}}", done.stdout + done.stderr


@pytest.mark.fault(16)
def test_hanging_command_ends_on_an_unreachable_node(lab: Lab) -> None:
    node = lab.near[0]
    with ThreadPoolExecutor() as pool, session_to(lab, node) as session:
        hanging = pool.submit(session.run, ["sleep", "1000"], deadline_s=scaled(4))
        assert eventually(lambda: "sleep 1000" in str(node.commands()))
        with node.cable_pulled():
            assert eventually(lambda: "sleep 1000" not in str(node.commands())), node.commands()
        error = hanging.exception()
    assert isinstance(error, CsdctlError)
    assert error.node == "csd0"


@pytest.mark.fault(17)
@pytest.mark.fault(20)
def test_every_loss_is_detected_and_never_taken_for_success(lab: Lab) -> None:
    """Lose three nodes at once, each in a different way, while a command runs on each."""
    # The clock is TCP's, set by these; a loss that TCP does not see ends as a DeadlineError.
    assert KEEPALIVE_INTERVAL_S + DEAD_PEER_S <= 15
    pulled, rebooted, server_killed = lab.near
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        sessions = {node.name: stack.enter_context(session_to(lab, node)) for node in lab.near}
        runs = {
            name: pool.submit(session.run, ["sleep", "1000"], deadline_s=1000)
            for name, session in sessions.items()
        }
        assert eventually(lambda: all("sleep 1000" in str(node.commands()) for node in lab.near))
        rebooted.power_off()
        rebooted.restart()
        server_killed.restart()
        with pulled.cable_pulled():
            ends = {name: run.exception() for name, run in runs.items()}
    pulled.restart()  # its command would run until its own deadline, unaware of the loss
    assert list(ends) == ["csd0", "csd1", "csd2"]
    for name, end in ends.items():
        assert type(end) is UnreachableError
        assert end.node == name
        assert "connection was lost" in end.message
        assert end.remedy


@pytest.mark.fault(21)
def test_missing_or_wrong_python_is_named_before_anything_starts(project: Project, job: Path) -> None:
    without, wrong, right = project.lab.near
    nodes = [
        replace(without.node, python="/opt/none/bin/python3"),
        replace(wrong.node, python=str(Path(sys.base_prefix, "bin", "python3"))),
        right.node,
    ]
    project.write_fleet(*nodes)
    project.trust(without, wrong, right)
    said = project.refuse("train", str(job), "--batch-size", "8", code=1)
    assert "csd0: '/opt/none/bin/python3' is not a working Python" in said
    assert re.search("csd1: .*/python3 has no tensorflow", said)
    assert "csd2:" not in said
    assert "csdctl provision" in said


@pytest.mark.fault(24)
def test_programs_on_a_node_end_when_csdctl_is_killed(project: Project) -> None:
    node = project.lab.near[0]
    project.use(node)
    start = (*COMMAND, str(project.path), node.name)
    process = project.lab.host.start(*start, cwd=project.path, environment=ENVIRONMENT)
    assert process.stdout
    try:
        assert process.stdout.readline() == "started\n"
        assert len(node.commands()) > 10
    finally:
        process.kill()
        process.communicate()
    assert eventually(lambda: not node.commands()), node.commands()
