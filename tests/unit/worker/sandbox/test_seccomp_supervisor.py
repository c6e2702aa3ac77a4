"""Which tokens are valid, which addresses are this machine's, and who listens at a port."""

import os
import socket

import pytest

from csdctl.worker.sandbox.seccomp_supervisor import MAX_CONNECTIONS, Tokens, is_here, list_listeners, to_ip


def test_token_is_valid_once_also_where_the_address_is_mapped() -> None:
    tokens = Tokens(b"key")
    token = tokens.make(("10.0.0.1", 1024))
    assert not tokens.is_valid(token, ("10.0.0.2", 1024))
    assert tokens.is_valid(token, ("::ffff:10.0.0.1", 1024, 0, 0))
    assert not tokens.is_valid(token, ("10.0.0.1", 1024))


def test_peer_that_connects_without_end_does_not_fill_the_memory() -> None:
    tokens, address = Tokens(b"key"), ("10.0.0.1", 1024)
    results = [tokens.is_valid(tokens.make(address), address) for _ in range(MAX_CONNECTIONS + 10)]
    assert results == [True] * MAX_CONNECTIONS + [False] * 10


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.0.2.1", False),
    ],
)
def test_addresses_of_this_machine_are_known(host: str, expected: bool) -> None:
    assert is_here(to_ip(host)) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_listener_is_found_by_its_port(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening, socket.socket(family) as bound:
        bound.bind((host, 0))
        listeners = list(list_listeners(listening.getsockname()[1]))
        assert listeners == [(to_ip(host), os.fstat(listening.fileno()).st_ino)]
        assert list(list_listeners(bound.getsockname()[1])) == []
