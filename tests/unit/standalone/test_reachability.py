"""The program that opens doors and knocks, as it runs on machines: processes and real sockets."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import csdctl

SOURCE = (Path(csdctl.__file__).parent / "standalone" / "reachability.py").read_text()


class Keeper:
    """One running program."""

    def __init__(self, name: str, address: str, *, is_host: bool = False, token: str = "secret") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SOURCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name, self.address = name, address
        self.answer = self.ask({"name": name, "token": token, "address": address, "is_host": is_host})

    def ask(self, asked: object) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def knock(self, *doors: tuple[str, str, int]) -> list[str]:
        """Why each door was not opened, '' when it was."""
        return [why for _, _, why in self.ask({"doors": doors, "deadline_s": 5})["knocks"]]

    def close(self) -> int:
        """The exit code, after its input has ended."""
        self._process.communicate(timeout=30)
        return self._process.returncode


@pytest.fixture
def host() -> Iterator[Keeper]:
    keeper = Keeper("host", "127.0.0.1", is_host=True)
    yield keeper
    keeper.close()


def test_ranks_port_is_the_first_free_one_and_the_host_opens_one_more(host: Keeper) -> None:
    other = Keeper("csd0", "127.0.0.1")
    rank, daemon = host.answer["ports"]
    [taken_after] = other.answer["ports"]
    assert 1024 <= rank < taken_after < 32768 < daemon
    assert other.close() == 0


def test_open_door_is_told_from_a_closed_one(host: Keeper) -> None:
    other = Keeper("csd0", "127.0.0.2")
    [port] = other.answer["ports"]
    assert host.knock(("csd0", "127.0.0.2", port), ("csd0", "127.0.0.3", port)) == ["", "connection refused"]
    assert other.close() == 0


def test_door_of_another_machine_is_not_taken_for_the_right_one(host: Keeper) -> None:
    other = Keeper("csd1", "127.0.0.2")
    [port] = other.answer["ports"]
    assert host.knock(("csd0", "127.0.0.2", port)) == ["csd1 answers there"]
    assert other.close() == 0


def test_door_of_another_examination_is_not_taken_for_ours(host: Keeper) -> None:
    other = Keeper("csd0", "127.0.0.2", token="other")
    [port] = other.answer["ports"]
    assert host.knock(("csd0", "127.0.0.2", port)) == ["something else answers there"]
    assert other.close() == 0


@pytest.mark.fault(50)
def test_address_that_is_not_the_machines_own_is_said() -> None:
    keeper = Keeper("csd0", "192.0.2.77")
    assert "no port can be opened at 192.0.2.77" in keeper.answer["error"]
    assert keeper.close() == 0
