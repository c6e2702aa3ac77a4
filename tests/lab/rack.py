"""Three servers on the lab's front network, each with three nodes in a tunnel of its own.

    storage1 (the lab's host) ──┬── csd0, csd1, csd2          10.1.1.0/24
    storage2 ───────────────────┼── csd0, csd1, csd2          10.1.1.0/24, another one
    storage3 ───────────────────┴── csd0, csd1, csd2          10.1.1.0/24, another one
             10.77.0.0/24

A node reaches its server alone: the ports of a tunnel's switch are isolated from each other.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import yaml

from csdctl.fleet.model import SERVER_MARK
from tests.lab import network
from tests.lab.lab import Lab
from tests.lab.machines import LabNode, NodeSpec
from tests.lab.network import Segment, run_ip
from tests.lab.project import Project

BETWEEN = "10.77.0.0/24"
TUNNEL = "10.1.1.0/24"
NUM_SERVERS = NUM_NODES = 3
FIRST_NUMBER = 40


@dataclass(frozen=True)
class Server:
    """A server with its nodes; without a machine it is the lab's host."""

    name: str
    address: str
    machine: LabNode | None
    nodes: tuple[LabNode, ...]

    @property
    def machines(self) -> tuple[LabNode, ...]:
        """Its own machine, if it is a node of the lab, and its nodes."""
        return (*([self.machine] if self.machine else []), *self.nodes)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """No power: neither the server nor its nodes answer."""
        with ExitStack() as stack:
            for machine in self.machines:
                stack.enter_context(machine.switched_off())
            yield


@contextmanager
def open_rack(lab: Lab) -> Iterator[tuple[Server, ...]]:
    """Add the servers and their nodes to the lab, and remove them at the end."""
    before = set(lab.nodes)
    try:
        servers = tuple(_add_server(lab, number) for number in range(1, NUM_SERVERS + 1))
        for name in lab.nodes.keys() - before:
            lab.nodes[name].wait_until_up()
        yield servers
    finally:
        for name in reversed([name for name in lab.nodes if name not in before]):
            lab.nodes.pop(name).remove()
        run_ip(lab.host.namespace, "link del tunnel")
        network.forget_neighbours(lab.front)


def use_rack(project: Project, servers: Sequence[Server], **host: object) -> None:
    """Write a fleet file of `servers` and the settings of the host, with known host keys."""
    entries = [
        {
            "name": server.name,
            "address": server.address,
            "network": TUNNEL,
            "nodes": [
                {"name": f"csd{number}", "address": node.spec.address}
                for number, node in enumerate(server.nodes)
            ],
        }
        for server in servers
    ]
    first = servers[0].nodes[0].node
    defaults = {"key": str(first.key), "python": first.python}
    content = {"host": host, "network": BETWEEN, "defaults": defaults, "servers": entries}
    (project.path / "fleet.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    lines = [server.machine.known_hosts_line for server in servers if server.machine]
    lines += [
        f"{server.name}{SERVER_MARK}csd{number} {node.public_key}"
        for server in servers
        for number, node in enumerate(server.nodes)
    ]
    (project.path / ".csdctl").mkdir(exist_ok=True)
    (project.path / ".csdctl" / "known_hosts").write_text("".join(lines))


def _add_server(lab: Lab, number: int) -> Server:
    name, address, machine = f"storage{number}", lab.front.ipv4(1), None
    if number > 1:
        address = lab.front.ipv4(FIRST_NUMBER + number)
        machine = lab.add(NodeSpec(name, address), lab.front)
    namespace = machine.namespace if machine else lab.host.namespace
    tunnel = Segment(namespace, "tunnel", "10.1.1", "fd77:0:0:3")
    network.make_bridge(tunnel)
    network.give_addresses(namespace, tunnel.bridge, [tunnel.ipv4(1)])
    nodes = []
    for place in range(NUM_NODES):
        node = lab.add(NodeSpec(f"{name}-csd{place}", tunnel.ipv4(2 + place)), tunnel)
        run_ip(namespace, f"link set p-{node.name} type bridge_slave isolated on")
        nodes.append(node)
    return Server(name, address, machine, tuple(nodes))
