"""Nodes behind jump hosts: two real servers, the connection to one goes through the other."""

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import JumpHostError, UnreachableError
from csdctl.fleet.model import Fleet, Node
from csdctl.transport import ssh
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.many import run_on_nodes
from csdctl.transport.session import Session
from csdctl.transport.ssh import connect, watch_peer
from tests.attacks.hostile_ssh import raw_server
from tests.patience import scaled, stays

Server = Any


def behind(server: Server, gate: Server, **changes: Any) -> Node:
    return server.node(jump=gate.node(name="gate"), **changes)


def both_known(server: Server, gate: Server) -> list[Path]:
    return [server.known_hosts, gate.known_hosts]


def test_nodes_behind_one_jump_host_share_one_connection_to_it(
    server: Server, gate: Server, tmp_path: Path
) -> None:
    nodes = [behind(server, gate, name=f"csd{number}") for number in range(12)]
    all_done = threading.Barrier(len(nodes))

    def visit(session: Session) -> int:
        code = session.run(["true"]).exit_code
        # This gate drops its whole connection when a node sends on a closing channel; sshd does not.
        all_done.wait(timeout=scaled(60))
        return code

    server.trust_in(tmp_path)
    gate.trust_in(tmp_path)
    outcomes = run_on_nodes(Fleet(tuple(nodes)), visit, directory=tmp_path)
    assert [outcome.get() for outcome in outcomes.values()] == [0] * 12
    assert len(gate.connections) == 1
    assert len(server.connections) == 12


def test_jump_hosts_can_be_nested(server: Server, gate: Server) -> None:
    middle = gate.node(name="middle", jump=gate.node(name="gate"))
    with contextlib.closing(connect(server.node(jump=middle), both_known(server, gate))) as session:
        assert session.run(["true"]).exit_code == 0


def test_cause_is_an_error_of_the_jump_host_or_of_the_node_behind_it(server: Server, gate: Server) -> None:
    with pytest.raises(JumpHostError, match="jump host gate: host key of .* is unknown") as caught:
        connect(behind(server, gate), [server.known_hosts])
    assert "csdctl trust --limit gate" in caught.value.remedy
    with pytest.raises(UnreachableError, match="port 1 cannot be reached through gate") as down:
        connect(behind(server, gate, port=1), both_known(server, gate))
    assert not isinstance(down.value, JumpHostError)
    gate.forwards = False
    with pytest.raises(JumpHostError, match="jump host gate does not forward connections") as caught:
        connect(behind(server, gate), both_known(server, gate))
    assert "AllowTcpForwarding" in caught.value.remedy


@pytest.mark.fault(3)
def test_silent_node_behind_a_jump_host_ends_at_the_deadline(server: Server, gate: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = behind(server, gate, port=silent.getsockname()[1])
        with pytest.raises(UnreachableError, match="within 1 s"):
            connect(node, both_known(server, gate), connect_deadline_s=1)


@pytest.mark.fault(17)
def test_node_that_falls_silent_behind_a_jump_host_is_noticed(
    server: Server, gate: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jump host keeps responding. Only the node's traffic stops."""
    monkeypatch.setattr(ssh, "KEEPALIVE_INTERVAL_S", 1.0)
    monkeypatch.setattr(ssh, "DEAD_PEER_S", scaled(4))
    is_stopped = threading.Event()

    def forward(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not is_stopped.is_set():
                    sink.sendall(data)

    def relay(near: socket.socket, _: threading.Event) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as far:
            threading.Thread(target=forward, args=(far, near), daemon=True).start()
            forward(near, far)

    with raw_server(relay) as port:
        known_hosts = server.directory / "known_relay"
        known_hosts.write_text(f"[127.0.0.1]:{port} {server.public_key}")
        session = connect(behind(server, gate, port=port), [known_hosts, gate.known_hosts])
        assert session.run(["true"]).exit_code == 0
        is_stopped.set()
        with pytest.raises(UnreachableError, match="lost"):
            session.run(["sleep", "1000"], deadline_s=scaled(60))
        session.close()


def test_responding_peer_stays_connected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    known_hosts = KnownHosts.load([server.known_hosts])
    jumps = ssh.JumpHosts(known_hosts)
    transport = ssh.open_transport(server.node(), ssh.Deadline(scaled(10)), jumps)
    monkeypatch.setattr(ssh, "KEEPALIVE_INTERVAL_S", 0.05)
    monkeypatch.setattr(ssh, "DEAD_PEER_S", scaled(1.0))
    watch_peer(transport)
    assert stays(transport.is_active, scaled(2.0))
    transport.close()
