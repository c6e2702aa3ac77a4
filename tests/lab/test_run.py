"""FAULTS 16–24: commands that hang, flood their output, or lose their machine or their csdctl."""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, UnreachableError
from csdctl.transport.ssh import DEAD_PEER_S, KEEPALIVE_INTERVAL_S, SshSession, connect
from tests.lab import network
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.project import Project
from tests.patience import eventually, scaled
from tests.started_programs import COMMAND, ENVIRONMENT

pytestmark = pytest.mark.lab

MIB = 1 << 20


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
