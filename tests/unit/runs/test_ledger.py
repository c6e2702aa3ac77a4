"""The ledger: bytes sent by commands, one line for each link and traffic class."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.reporting.privacy import Flow, add_flows
from csdctl.runs.ledger import Ledger, LedgerEntry, read_ledger


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


def test_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"time": 1}\n')
    with pytest.raises(InputError, match="ledger.jsonl:1 is not a valid ledger entry"):
        list(read_ledger(tmp_path / "ledger.jsonl"))


def test_flows_are_sums_over_commands_of_one_run_or_of_all() -> None:
    entries = [
        LedgerEntry(1.0, "deploy", "", "host", "csd0", "code", 5),
        LedgerEntry(2.0, "train", "r1", "host", "csd0", "code", 6),
        LedgerEntry(3.0, "train", "r1", "host", "csd0", "gradient", 60),
        LedgerEntry(4.0, "train", "r2", "csd0", "host", "gradient", 7),
    ]
    assert add_flows(entries, "r1") == [Flow("host", "csd0", "gradient", 60), Flow("host", "csd0", "code", 6)]
    assert add_flows(entries)[-1] == Flow("host", "csd0", "code", 11)
