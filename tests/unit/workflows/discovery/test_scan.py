"""Scanning real sockets on loopback addresses."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.errors import InputError, NoNodeReachableError
from csdctl.workflows.discovery.scan import expand_addresses, scan
from tests.patience import scaled


@contextlib.contextmanager
def listening(greetings: dict[str, bytes]) -> Iterator[int]:
    """Listen on one port of several loopback addresses, each with its banner (b'' sends none)."""
    with contextlib.ExitStack() as stack:
        port = 0
        for address, greeting in greetings.items():
            server = stack.enter_context(socket.create_server((address, port)))
            port = server.getsockname()[1]
            threading.Thread(target=_greet, args=(server, greeting), daemon=True).start()
            stack.callback(server.shutdown, socket.SHUT_RDWR)
        yield port


def _greet(server: socket.socket, greeting: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            connection.sendall(greeting)
            if greeting:
                connection.close()


def test_scan_finds_ssh_servers_only() -> None:
    greetings = {
        "127.0.9.1": b"SSH-2.0-a\r\n",
        "127.0.9.3": b"SSH-2.0-b\r\n",
        "127.0.9.4": b"HTTP/1.1 400\r\n",
    }
    with listening({**greetings, "127.0.9.5": b""}) as port:
        nodes = scan(
            ["127.0.9.0/29"], user="trainer", key=Path("/key"), port=port, banner_timeout_s=scaled(1.5)
        )
    assert [(node.name, node.address) for node in nodes] == [("csd0", "127.0.9.1"), ("csd1", "127.0.9.3")]
    assert {(node.user, node.key, node.port) for node in nodes} == {("trainer", Path("/key"), port)}


def test_scan_skips_this_machine() -> None:
    with listening({"127.0.0.1": b"SSH-2.0-a\r\n"}) as port, pytest.raises(NoNodeReachableError):
        scan(["127.0.0.1/32"], user="root", port=port)


@pytest.mark.parametrize(
    ("cidr", "addresses"),
    [
        ("10.1.2.9/30", ["10.1.2.9", "10.1.2.10"]),
        ("10.1.2.4/31", ["10.1.2.4", "10.1.2.5"]),
        ("10.1.2.4", ["10.1.2.4"]),
        ("fd00::/126", ["fd00::1", "fd00::2", "fd00::3"]),
    ],
)
def test_network_expands_to_its_host_addresses(cidr: str, addresses: list[str]) -> None:
    assert expand_addresses(cidr) == addresses


@pytest.mark.parametrize("cidr", ["", "here", "10.0.0.0/33", "-oProxyCommand=x", "10.0.0.0/19", "fd00::/64"])
def test_invalid_or_large_range_is_refused(cidr: str) -> None:
    with pytest.raises(InputError, match="not an address range|at most 4096"):
        expand_addresses(cidr)
