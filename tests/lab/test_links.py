"""Links over networks of their own: a cable for each node, without routes between the nodes."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.lab.lab import Lab
from tests.lab.machines import INTERFACE, LabNode
from tests.lab.network import NAMESPACES, run_command, run_ip
from tests.lab.project import Project

pytestmark = pytest.mark.lab

CUT = """\
table inet cut {
  chain input {
    type filter hook input priority 0
    iifname "mpi" drop
  }
}
"""
ONLY_SSH = """\
table inet lab {
  chain input {
    type filter hook input priority 0
    iifname "%s" tcp dport != 22 ct state new drop
  }
}
"""


def shape(namespace: str, rules: str) -> None:
    run_command("nsenter", f"--net={NAMESPACES / namespace}", "nft", "-f", "-", input_text=rules)


@contextmanager
def cable(lab: Lab, node: LabNode, addresses: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A cable between the host and a node; addresses of both ends, with the length of their prefix."""
    end = f"l-{node.name}"
    run_ip(lab.host.namespace, f"link add {end} type veth peer name mpi netns {node.namespace}")
    try:
        for near, far in addresses:
            nodad = " nodad" * (":" in near)
            run_ip(lab.host.namespace, f"addr add {near} dev {end}{nodad}", f"link set {end} up")
            run_ip(node.namespace, f"addr add {far} dev mpi{nodad}", "link set mpi up")
        yield end
    finally:
        run_ip(lab.host.namespace, f"link del {end}")


@contextmanager
def closed_except_ssh(lab: Lab, nodes: Sequence[LabNode]) -> Iterator[None]:
    """The network of SSH lets nothing else pass."""
    places = {lab.host.namespace: lab.front.bridge, **{node.namespace: INTERFACE for node in nodes}}
    with ExitStack() as stack:
        for namespace, interface in places.items():
            shape(namespace, ONLY_SSH % interface)
            stack.callback(shape, namespace, "delete table inet lab\n")
        yield


@contextmanager
def cables(lab: Lab, *, ipv6: bool = False) -> Iterator[None]:
    with ExitStack() as stack:
        for number, node in enumerate(lab.near):
            first = 4 * number
            pair = (f"10.92.{number}.{first + 1}/30", f"10.92.{number}.{first + 2}/30")
            if ipv6:
                pair = (f"fd91::{number}:1/112", f"fd91::{number}:2/112")
            stack.enter_context(cable(lab, node, [pair]))
        yield


def trains(project: Project, job: Path, *options: str) -> str:
    project.succeed("doctor", "--json")
    done = project.succeed("train", str(job), "--batch-size", "8", *options)
    return done.stderr + done.stdout


@pytest.mark.parametrize(
    ("network", "ipv6"), [("10.92.0.0/16", False), ("", False), ("fd91::/64", True)], ids=str
)
def test_each_node_is_behind_a_cable_of_its_own(
    lab: Lab, project: Project, job: Path, network: str, *, ipv6: bool
) -> None:
    with cables(lab, ipv6=ipv6), closed_except_ssh(lab, lab.near):
        project.use(*lab.near, **{"network": network} if network else {})
        trains(project, job)


@pytest.mark.fault(50)
def test_cut_cable_is_named(lab: Lab, project: Project, job: Path) -> None:
    with cables(lab), closed_except_ssh(lab, lab.near):
        project.use(*lab.near, network="10.92.0.0/16")
        shape(lab.near[1].namespace, CUT)
        try:
            done = project.csdctl("doctor", "--json")
        finally:
            shape(lab.near[1].namespace, "delete table inet cut\n")
        assert done.returncode != 0
        red = [check for check in json.loads(done.stdout)["checks"] if check["status"] == "fail"]
        (check,) = red
        assert (check["machine"], check["check"]) == (lab.near[1].name, "link")
        assert "did not connect: no connection to 10.92.1.5 port " in check["found"]
        assert "timed out" in check["found"]


def test_machines_have_ipv6_alone(lab: Lab, project: Project, job: Path) -> None:
    with lab.node("six0", 80, is_ipv6=True) as first, lab.node("six1", 81, is_ipv6=True) as second:
        project.use(first, second)
        trains(project, job)
