"""Who gets in at the sandbox's ports when the kernel reports connections before their token has arrived."""

import ipaddress
import select
import socket
from collections.abc import Iterator

import pytest

from csdctl.worker.sandbox import seccomp_supervisor as arrivals
from csdctl.worker.sandbox.seccomp_supervisor import Arrivals, Tokens
from tests.patience import WAIT_S, scaled

PEERS = [ipaddress.ip_network("127.0.0.0/8")]


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with socket.create_server((request.param, 0), backlog=1000) as listening:
        listening.setblocking(False)
        yield listening


def connect(listening: socket.socket) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listening.getsockname()[1]))


def wait_for(listening: socket.socket) -> None:
    assert select.select([listening], [], [], scaled(WAIT_S))[0]


def test_token_that_comes_late_wakes_the_sandbox_which_then_gets_the_connection(
    listening: socket.socket,
) -> None:
    tokens = Tokens(b"key")
    supervisor = Arrivals(tokens, PEERS)
    with connect(listening) as member:
        wait_for(listening)
        with pytest.raises(BlockingIOError):
            supervisor.accept(listening)
        member.sendall(tokens.make(member.getpeername()) + b"hello")
        wait_for(listening)
        accepted, peer = supervisor.accept(listening)
        with accepted:
            assert peer == member.getsockname()
            assert accepted.recv(5) == b"hello"


def test_silent_strangers_beyond_the_limit_make_room_for_members(listening: socket.socket) -> None:
    tokens = Tokens(b"key")
    supervisor = Arrivals(tokens, PEERS)
    strangers = [connect(listening) for _ in range(arrivals.MAX_LATE)]
    with connect(listening) as member:
        for _ in range(len(strangers) // arrivals.MAX_STRANGERS + 1):
            with pytest.raises(BlockingIOError):
                supervisor.accept(listening)
        assert strangers[0].recv(1) == b""
        member.sendall(tokens.make(member.getpeername()))
        wait_for(listening)
        accepted, _ = supervisor.accept(listening)
        accepted.close()
    for stranger in strangers:
        stranger.close()


def test_token_is_valid_once_also_where_the_address_is_mapped() -> None:
    tokens = Tokens(b"key")
    token = tokens.make(("10.0.0.1", 1024))
    assert not tokens.is_valid(token, ("10.0.0.2", 1024))
    assert tokens.is_valid(token, ("::ffff:10.0.0.1", 1024, 0, 0))
    assert not tokens.is_valid(token, ("10.0.0.1", 1024))
