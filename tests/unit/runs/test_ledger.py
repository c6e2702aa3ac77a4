"""The ledger: bytes sent by commands, one line for each link and traffic class."""

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from csdctl.notify import Say, warn
from csdctl.reporting.privacy import Flow, add_flows
from csdctl.runs.ledger import Ledger, LedgerEntry, read_ledger

LOST = "lines are lost, repeated or changed, in places: 1; what left the machines is not known"


def test_commands_append_their_traffic_and_it_round_trips(tmp_path: Path) -> None:
    path = tmp_path / ".csdctl" / "ledger.jsonl"
    for command, run, count in (("prepare", "", 5), ("train", "r1", 70)):
        ledger = Ledger(path, command)
        ledger.run = run
        ledger.add({("host", "csd0", "code"): count, ("csd0", "host", "log"): 0})
        ledger.add({("host", "csd0", "code"): 1})
        ledger.save()
    found = [
        (entry.command, entry.run, entry.sender, entry.receiver, entry.kind, entry.num_bytes)
        for entry in read_ledger(path)
    ]
    assert found == [("prepare", "", "host", "csd0", "code", 6), ("train", "r1", "host", "csd0", "code", 71)]


def save(path: Path, count: int, say: Say = warn) -> None:
    Ledger(path, "train", say).save({("host", "csd0", "code"): count})


@pytest.mark.parametrize("num_cut", [1, 2, 60])
def test_line_that_was_cut_is_said_and_costs_no_other(tmp_path: Path, num_cut: int) -> None:
    """Without its end alone, it is whole."""
    path, said = tmp_path / "ledger.jsonl", list[str]()
    for count in (1, 2):
        save(path, count)
    os.truncate(path, path.stat().st_size - num_cut)
    save(path, 3, said.append)
    save(path, 4, said.append)
    assert said == [f"warning: {path}: its last line was cut"]
    said.clear()
    found = [entry.num_bytes for entry in read_ledger(path, said.append)]
    assert found == ([1, 2, 3, 4] if num_cut == 1 else [1, 3, 4])
    damaged = f"warning: {path}: lines that cannot be read: 1, the last is line 2"
    assert [line.partition(";")[0] for line in said] == [damaged] * (num_cut > 1)


@pytest.mark.parametrize("kept", [0, 2])
def test_lines_that_were_removed_from_the_end_are_said_also_after_others_are_appended(
    tmp_path: Path, kept: int
) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(3):
        Ledger(path, "train").save({("host", "csd0", "gradient"): 5})
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    for _ in range(2):
        said: list[str] = []
        list(read_ledger(path, said.append))
        assert said == [f"warning: {path}: {LOST}"]
        Ledger(path, "exec").save({("host", "csd0", "control"): 5})


def test_commands_that_end_at_once_leave_one_chain_of_lines(tmp_path: Path) -> None:
    path, said = tmp_path / "ledger.jsonl", list[str]()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(save, path), range(1, 101)))
    assert sorted(entry.num_bytes for entry in read_ledger(path, said.append)) == [*range(1, 101)]
    assert not said


def test_file_system_without_locks_has_lines_without_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path, said = tmp_path / "ledger.jsonl", list[str]()
    save(path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        save(path, 2)
    save(path, 3)
    assert [entry.num_bytes for entry in read_ledger(path, said.append)] == [1, 2, 3]
    assert not said
    assert [b'"check"' in line for line in path.read_bytes().splitlines()] == [True, False, True]


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_ledger_that_cannot_be_used_is_said_and_ends_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], put: Callable[[Path], object]
) -> None:
    path, said = tmp_path / "ledger.jsonl", list[str]()
    put(path)
    save(path, 1, said.append)
    assert list(read_ledger(path, said.append)) == []
    assert [str(path) in line for line in said] == [True, True]
    save(path, 1)
    printed = capsys.readouterr().err
    assert printed.startswith(f"warning: what train has sent is not recorded: cannot write {path}: ")


def test_flows_are_sums_over_commands_of_one_run_or_of_all() -> None:
    entries = [
        LedgerEntry(1.0, "deploy", "", "host", "csd0", "code", 5),
        LedgerEntry(2.0, "train", "r1", "host", "csd0", "code", 6),
        LedgerEntry(3.0, "train", "r1", "host", "csd0", "gradient", 60),
        LedgerEntry(4.0, "train", "r2", "csd0", "host", "gradient", 7),
    ]
    assert add_flows(entries, "r1") == [Flow("host", "csd0", "gradient", 60), Flow("host", "csd0", "code", 6)]
    assert add_flows(entries)[-1] == Flow("host", "csd0", "code", 11)
