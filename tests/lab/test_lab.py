"""The lab itself: isolated machines, addresses that exist only inside, and complete removal."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from csdctl.emulation.limits import list_cgroups
from tests.lab import network
from tests.lab.lab import PLACE, Lab, remove_stale_labs
from tests.patience import eventually

pytestmark = pytest.mark.lab

LEAVES_A_LAB = """
import sys, time
from tests.lab.lab import open_lab
with open_lab() as lab:
    with lab.node("busy", 99, cpu=0.5) as node:
        print(lab.name, flush=True)
        time.sleep(100_000)
"""


def test_addresses_exist_inside_the_namespaces_only(lab: Lab) -> None:
    assert "10.77." not in network.run_command("ip", "addr") + network.run_command("ip", "route")
    with (
        network.entered(lab.host.namespace),
        socket.create_connection((lab.near[0].node.address, 22), 10) as inside,
    ):
        assert inside.recv(4) == b"SSH-"


def test_killed_lab_ends_and_the_next_one_cleans_up(lab: Lab) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES_A_LAB], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    name = process.stdout.readline().strip()
    namespaces = network.list_namespaces(f"{name}-")
    assert len(namespaces) == 9
    process.kill()
    process.communicate()
    assert eventually(lambda: not any(network.list_processes(namespace) for namespace in namespaces))
    remove_stale_labs()

    # The lab of another session on this machine may have been faster to begin with it.
    def is_removed() -> bool:
        return not (
            network.list_namespaces(f"{name}-") or list_cgroups(f"{name}-") or (PLACE / name).exists()
        )

    assert eventually(is_removed)
