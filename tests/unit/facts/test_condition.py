"""Probes of preflight checks: hostname, addresses, and writable directories."""

import os
import sys
from pathlib import Path

import pytest

from csdctl.facts.machine import CONDITION_FACTS, ClockTrip, collect_condition, parse_facts, parse_places
from csdctl.fleet.facts import Condition, DirectorySpace
from csdctl.transport.local import LocalSession
from tests.patience import scaled

# df of GNU coreutils, as the script prints it; the second place is a full tmpfs.
PLACES = """\
place /root
space /dev/vda         264212084 24881724  81509188      24% /
inodes /dev/vda       16777216 447426 16329790    3% /
place /tmp
refused sh: 4: printf: printf: I/O error
space tmpfs                   64    64         0     100% /tmp
inodes tmpfs          0     0     0     - /tmp
"""


def test_directories_are_parsed_with_space_inodes_and_refusal() -> None:
    assert parse_places(PLACES) == {
        "home_space": DirectorySpace("/root", 81509188 * 1024, 16329790),
        "temporary_space": DirectorySpace("/tmp", 0, None, "I/O error"),
    }


@pytest.mark.parametrize(
    ("name", "answer", "field"),
    [
        ("hostname", "h" * 900_000, "hostname"),
        ("hostname", "a\x1b[2J", "hostname"),
        ("addresses", " |-- 999.1.1.1\n /32 host LOCAL", "addresses"),
        ("open files", "9" * 4000, "open_files"),
        ("places", f"place /\nplace /\nspace x 1 1 {'9' * 400} 1% /", "home_space"),
        ("places", "place a\x1b\nplace /", "home_space"),
    ],
)
def test_answer_out_of_range_is_unknown(name: str, answer: str, field: str) -> None:
    trips = [ClockTrip(1000.0, 0.5, "1000.9")]
    condition = parse_facts("csd0", f"csdctl-fact:{name}\n{answer}\n", trips, CONDITION_FACTS, Condition)
    assert getattr(condition, field) is None


def test_this_machine_has_a_condition(tmp_path: Path) -> None:
    session = LocalSession("host", tmp_path)
    condition = collect_condition(session, sys.executable, deadline_s=scaled(60))
    session.close()
    assert condition.python_version == sys.version.split()[0]
    assert condition.keras_version
    assert condition.has_prted is True
    assert condition.hostname == os.uname().nodename
    assert "127.0.0.1" in (condition.addresses or ())
    assert condition.home_space is not None
    assert condition.home_space.path == str(tmp_path)
    assert condition.home_space.refusal == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(26)
def test_unwritable_home_is_reported() -> None:
    session = LocalSession("host", Path("/proc"))
    condition = collect_condition(session, sys.executable, deadline_s=scaled(60))
    session.close()
    assert condition.home_space is not None
    assert condition.home_space.refusal
