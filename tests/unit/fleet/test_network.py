"""Names and addresses of this machine."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.network import is_this_machine


def test_names_of_this_machine_are_recognized_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Server.lab")
    same = ["server", "SERVER", "server.lab", "localhost", "LocalHost.x", "host", "127.0.0.1"]
    other = ["server1", "csd0", "csd0.server", "192.0.2.3", "127", "server-2", "127.0.0.2"]
    assert [name for name in (*same, *other) if is_this_machine(name)] == same


def test_node_with_csdctls_name_of_the_host_must_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("nodes: [{name: host, address: 192.0.2.1}]\n")
    with pytest.raises(InputError, match="csdctl uses this name for its own machine") as raised:
        load_fleet(tmp_path / "fleet.yaml")
    assert raised.value.remedy == "give the node another `name`; its `address` may stay"
