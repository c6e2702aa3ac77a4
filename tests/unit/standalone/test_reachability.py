"""The reachability program as it runs on machines: processes and real sockets."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import csdctl
from tests.patience import scaled

GREETING_BYTES = 1 << 16
SOURCE = (Path(csdctl.__file__).parent / "standalone" / "reachability.py").read_text()


class Program:
    """A running reachability program."""

    def __init__(self, name: str, address: str, *, is_host: bool = False, token: str = "secret") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SOURCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name, self.address = name, address
        self.response = self.request(
            {
                "name": name,
                "token": token,
                "address": address,
                "is_host": is_host,
                "num_bytes": GREETING_BYTES,
            }
        )

    def request(self, request: object) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        response: dict[str, Any] = json.loads(self._process.stdout.readline().partition(" ")[2])
        return response

    def connect(self, *listeners: tuple[str, str, int], deadline_s: float = scaled(5)) -> list[str]:
        """The reason of failure for each listener, '' after success."""
        response = self.request({"listeners": listeners, "deadline_s": deadline_s})
        return [reason for _, _, reason in response["attempts"]]

    def close(self) -> int:
        """End its input; return the exit code."""
        self._process.communicate()
        return self._process.returncode


@pytest.fixture
def host() -> Iterator[Program]:
    program = Program("host", "127.0.0.1", is_host=True)
    yield program
    program.close()


def test_rank_gets_first_free_port_and_host_opens_one_more(host: Program) -> None:
    other = Program("csd0", "127.0.0.1")
    rank, daemon = host.response["ports"]
    [taken_after] = other.response["ports"]
    assert 1024 <= rank < taken_after < 32768 < daemon
    assert other.close() == 0


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("csd0", "secret", ["", "connection refused"]),
        ("csd1", "secret", ["csd1 listens there", "connection refused"]),
        ("csd0", "other", ["another program listens there", "connection refused"]),
    ],
)
def test_only_the_listener_of_that_machine_and_check_is_accepted(
    host: Program, name: str, token: str, expected: list[str]
) -> None:
    other = Program(name, "127.0.0.2", token=token)
    [port] = other.response["ports"]
    assert host.connect(("csd0", "127.0.0.2", port), ("csd0", "127.0.0.3", port)) == expected
    assert other.close() == 0


def test_listener_whose_response_does_not_arrive_whole_is_no_success(host: Program) -> None:
    """It fills packets: a network that drops the large ones lets the connection alone through."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert host.connect(("csd0", "127.0.0.1", port), deadline_s=0.5) == [
            "connected, but received no response"
        ]
    with socket.create_connection(("127.0.0.1", host.response["ports"][0])) as connection:
        assert len(connection.makefile("rb").read()) == GREETING_BYTES


@pytest.mark.fault(50)
def test_foreign_address_is_reported() -> None:
    program = Program("csd0", "192.0.2.77")
    assert "no port can be opened at 192.0.2.77" in program.response["message"]
    assert program.close() == 0
