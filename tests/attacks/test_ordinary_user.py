"""An ordinary user on host and nodes, from discover to report, with sources that only that user may read."""

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.ordinary_user import OrdinaryUser
from tests.emulated.small_jobs import dense_model, save_arrays, small_job
from tests.needs import miss

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

JOB = small_job("epochs: 2, learning_rate: 0.01")
MODEL = dense_model(8, 8, 1)
COMMANDS = {
    "discover": (),
    "doctor": (),
    "prepare": (),
    "tune": ("--max-global-batch=12", "--probe-seconds=0.1"),
    "train": ("--skip-doctor", "--json"),
    "report": ("--json",),
    "inventory": ("--output", "hosts.ini"),
}
SOCKETS = (stat.S_ISLNK, stat.S_ISSOCK)
"""Permissions of these say nothing on Linux."""


@pytest.fixture(scope="module")
def user() -> Iterator[OrdinaryUser]:
    user = OrdinaryUser()
    try:
        if reason := user.why_not():
            miss("csdctl for all users", reason[-300:])
        up = user.csdctl("emulate", "up", "--nodes", "1", "--cpu", "1")
        assert up.returncode == 0, up.stderr
        yield user
    finally:
        user.csdctl("emulate", "down")
        shutil.rmtree(user.home)


def write_private(user: OrdinaryUser, path: Path, content: str = "") -> Path:
    """Write a source that only the user may read."""
    path.write_text(content)
    path.chmod(0o600)
    return user.own(path)


def write_samples(user: OrdinaryUser, directory: Path, count: int) -> None:
    """Write samples that only the user may read."""
    save_arrays(directory, count, 8, 8)
    directory.chmod(0o700)
    for path in directory.iterdir():
        path.chmod(0o600)
        user.own(path)
    user.own(directory)


def wider_than_its_owner(directory: Path) -> list[str]:
    """Everything below `directory` that has a permission for the group or for others.

    But for the directory that the system's fontconfig makes when Matplotlib looks for fonts.
    """
    found = []
    for path in sorted(directory.rglob("*")):
        if path.match(".cache/fontconfig"):
            continue
        mode = path.lstat().st_mode
        if mode & 0o077 and not any(is_other(mode) for is_other in SOCKETS):
            found.append(f"{stat.filemode(mode)} {path.relative_to(directory)}")
    return found


@pytest.mark.attack(7)
@pytest.mark.attack(15)
def test_everything_from_discover_to_report_is_readable_by_its_user_alone(user: OrdinaryUser) -> None:
    write_private(user, user.home / "job.yaml", JOB)
    write_private(user, user.home / "model.py", MODEL)
    nodes = user.home / ".csdctl/emulated/nodes"
    write_samples(user, user.home / "public", 60)
    write_samples(user, nodes / "csd0/home/private", 61)
    for command, arguments in COMMANDS.items():
        done = user.csdctl(command, *arguments)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    trained = [json.loads(line) for line in (user.home / ".csdctl/ledger.jsonl").read_text().splitlines()]
    assert {entry["kind"] for entry in trained} >= {"code", "model", "gradient"}
    wider = wider_than_its_owner(user.home)
    assert not wider, "\n".join(wider)
    assert {path.stat().st_uid for path in user.home.rglob("*")} == {user.uid}
