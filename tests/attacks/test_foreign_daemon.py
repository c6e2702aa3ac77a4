"""Other machines and users look for the ports and sockets of a run: they are closed to them."""

import contextlib
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.lab import network
from tests.lab.lab import Lab
from tests.lab.network import run_ip
from tests.lab.project import Project
from tests.lab.test_main_job import start_training
from tests.patience import scaled

pytestmark = [pytest.mark.lab, pytest.mark.thorough]

NETWORK = "10.77.0.0/24"
SSH = 22
LISTENING = "0A"
DROPPED_S = 0.5
"""A packet without any answer for so long was dropped."""


@dataclass(frozen=True)
class Machine:
    """A machine of the run; addresses that are inside and outside of its network."""

    namespace: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]


def listening_at(namespace: str) -> set[tuple[str, int]]:
    """Return the addresses and ports of all listeners of a machine but SSH's."""
    pid = network.list_processes(namespace)[0]
    listeners = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            packed, _, port = local.partition(":")
            words = [bytes.fromhex(packed[place : place + 8])[::-1] for place in range(0, len(packed), 8)]
            if state == LISTENING and int(port, 16) != SSH:
                listeners.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return listeners


def try_port(namespace: str, source: str, host: str, port: int, answer_s: float) -> str:
    """Connect from a machine's address, say something, and return what came: an error, 'closed' or more."""
    with (
        network.entered(namespace),
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connecting,
    ):
        connecting.settimeout(answer_s)
        connecting.bind((source, 0))
        try:
            connecting.connect((host, port))
        except OSError as error:
            return type(error).__name__
        try:
            connecting.sendall(bytes(64))
            return f"received {received!r}" if (received := connecting.recv(100)) else "closed"
        except ConnectionError:
            return "closed"


@contextlib.contextmanager
def more_addresses(lab: Lab) -> Iterator[list[Machine]]:
    """Give the host and two nodes an address of another network, and a second one inside."""
    interfaces = [(lab.host.namespace, lab.front.bridge, 1)]
    interfaces += [(node.namespace, "csd", 10 + number) for number, node in enumerate(lab.near[:2])]
    added, machines = [], []
    with ExitStack() as stack:
        for namespace, interface, number in interfaces:
            inside, outside = [lab.front.ipv4(number)], [f"10.88.0.{number}", lab.front.ipv6(number)]
            added = [outside[0], lab.front.ipv4(100 + number)]
            network.give_addresses(namespace, interface, added)
            lines = [f"addr del {address}/24 dev {interface}" for address in added]
            stack.callback(run_ip, namespace, *lines)
            machines.append(Machine(namespace, (*inside, *added[1:]), tuple(outside)))
        yield machines


@pytest.mark.attack(3)
def test_ports_of_a_run_are_closed_outside_of_its_network(project: Project, job: Path) -> None:
    project.use(project.lab.near[0], network=NETWORK)
    with more_addresses(project.lab) as (*machines, stranger):
        process = start_training(project, job)
        try:
            (run,) = (project.path / ".csdctl/runs").glob("*")
            pid = network.list_processes(machines[0].namespace)[0]
            names = re.findall(rf"@csdctl/{run.name}/(\S+)", Path(f"/proc/{pid}/net/unix").read_text())
            assert names
            assert all(re.search(r"[0-9a-f]{32}", name) for name in names), "a name can be predicted"
            ports = [(machine, listening_at(machine.namespace)) for machine in machines]
            for source, target in zip(stranger.outside, machines[1].outside, strict=True):
                said = try_port(stranger.namespace, source, target, SSH, scaled(20))
                assert "SSH" in said, "it is not reached at all"
            for (machine, listeners), peer in zip(ports, reversed(machines), strict=True):
                print(machine, listeners)
                assert len(listeners) > 1
                check_ports(machine, listeners, peer, stranger)
        finally:
            printed = project.interrupt(process)
        assert "is lost" not in printed


def check_ports(machine: Machine, listeners: set[tuple[str, int]], peer: Machine, stranger: Machine) -> None:
    """Try the ports of `machine` as a stranger, who is in its network too, and as its peer."""
    answers = set()
    for port in {port for host, port in listeners if not ip_address(host).is_loopback}:
        for source, target in (
            *zip(stranger.outside, machine.outside, strict=True),
            *((stranger.inside[0], target) for target in machine.inside),
        ):
            result = try_port(stranger.namespace, source, target, port, DROPPED_S)
            assert result in ("ConnectionRefusedError", "TimeoutError"), (machine, port, target, result)
        result = try_port(peer.namespace, peer.inside[0], machine.inside[0], port, scaled(20))
        assert result in ("closed", "ConnectionRefusedError"), (machine, port, result)
        answers.add(result)
    assert "closed" in answers, "no port was reached from the peer"
