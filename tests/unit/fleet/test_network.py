"""Names by which the host knows itself."""

import socket
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.network import means_host, own_names

OWN = frozenset({"host", "localhost", "server", "192.0.2.2", "127.0.0.1"})


def test_names_of_the_host_are_recognized_and_no_others() -> None:
    assert {"host", "localhost", "127.0.0.1", socket.gethostname().partition(".")[0].lower()} <= own_names()
    same = ["server", "SERVER", "server.lab", "localhost", "LocalHost.x", "host", "192.0.2.2"]
    other = ["server1", "csd0", "csd0.server", "192.0.2.3", "192", "server-2", "127.0.0.2"]
    assert [name for name in (*same, *other) if means_host(name, OWN)] == same


def test_node_with_csdctls_name_of_the_host_must_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("nodes: [{name: host, address: 192.0.2.1}]\n")
    with pytest.raises(InputError, match="csdctl uses this name for its own machine") as raised:
        load_fleet(tmp_path / "fleet.yaml")
    assert raised.value.remedy == "give the node another `name`; its `address` may stay"
