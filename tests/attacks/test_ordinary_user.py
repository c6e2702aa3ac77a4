"""An ordinary user on host and nodes, from discover to report, with sources that only that user may read."""

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import csdctl
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

USER = "nobody"
PROGRAM = "from csdctl.cli.app import main; main()"

# The interpreter may lie below a directory that other users may not enter, such as root's home. In a mount
# namespace that directory is replaced by one that holds the interpreter alone, at the same path.
_ENTER = """\
set -e
closed=$1 interpreter=$2 user=$3 group=$4; shift 4
if [ -n "$closed" ]; then
    aside=$(mktemp -d)
    mount -t tmpfs -o mode=0755 csdctl-test "$aside"
    mkdir -p "$aside/${interpreter#"$closed"}"
    mount --bind "$interpreter" "$aside/${interpreter#"$closed"}"
    mount --rbind "$aside" "$closed"
    umount --lazy "$aside"
    rmdir "$aside"
fi
exec setpriv --reuid "$user" --regid "$group" --clear-groups --inh-caps=-all --bounding-set=-all -- "$@"
"""


class OrdinaryUser:
    """An account without privileges, with a directory that belongs to it."""

    def __init__(self) -> None:
        entry = pwd.getpwnam(USER) if os.geteuid() == 0 else pwd.getpwuid(os.getuid())
        self.uid, self.gid = entry.pw_uid, entry.pw_gid
        # Not below pytest's own directory, which only root may enter.
        self.home = Path(tempfile.mkdtemp(prefix="csdctl-user-"))
        self.own(self.home)

    def own(self, path: Path) -> None:
        """Give `path` to the user."""
        os.chown(path, self.uid, self.gid)

    def csdctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run csdctl in the user's directory, with a login's usual umask."""
        return self.run([sys.executable, "-c", PROGRAM, *arguments])

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as the user."""
        return subprocess.run(
            [*self._prefix(), *command],
            cwd=self.home,
            env={
                "HOME": str(self.home),
                "PATH": os.environ["PATH"],
                "LANG": "C.UTF-8",
                "PYTHONPATH": str(Path(csdctl.__file__).parents[1]),
                "CSDCTL_EMULATE_PID": str(os.getpid()),
            },
            umask=0o022,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def why_not(self) -> str:
        """Return why this user cannot run csdctl here; '' if it can."""
        done = self.run([sys.executable, "-c", "import os, sys, csdctl; print(os.geteuid(), sys.prefix)"])
        expected = f"{self.uid} {sys.prefix}\n"
        return "" if done.stdout == expected else f"{done.stdout}{done.stderr}".strip() or "no output"

    def _prefix(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        enter = ["sh", "-c", _ENTER, "sh", _closed_directory(), sys.base_prefix, str(self.uid), str(self.gid)]
        return ["unshare", "--mount", *enter]


def _closed_directory() -> str:
    """Return the outermost directory on the way to the interpreter that other users may not enter, or ''."""
    strategy = [*reversed(Path(sys.base_prefix).parents), Path(sys.base_prefix)]
    return next((str(place) for place in strategy if not place.stat().st_mode & 0o001), "")


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


def make_private(user: OrdinaryUser, *places: Path) -> None:
    """Let only the user read these files and directories."""
    for path in (path for place in places for path in (place, *place.rglob("*"))):
        path.chmod(0o700 if path.is_dir() else 0o600)
        user.own(path)


def wider_than_its_owner(directory: Path) -> list[str]:
    """Everything below `directory` that has a permission for the group or for others.

    Permissions of links and sockets say nothing on Linux. The directory that the system's fontconfig makes
    when Matplotlib looks for fonts is left out.
    """
    wider = []
    for path in sorted(directory.rglob("*")):
        if path.match(".cache/fontconfig"):
            continue
        mode = path.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode) and not stat.S_ISSOCK(mode):
            wider.append(f"{stat.filemode(mode)} {path.relative_to(directory)}")
    return wider


@pytest.mark.attack(7)
@pytest.mark.attack(15)
def test_everything_from_discover_to_report_is_readable_by_its_user_alone(user: OrdinaryUser) -> None:
    job, model, public = (user.home / name for name in ("job.yaml", "model.py", "public"))
    private = user.home / ".csdctl/emulated/nodes/csd0/home/private"
    job.write_text(JOB)
    model.write_text(MODEL)
    save_arrays(public, 60, 8, 8)
    save_arrays(private, 61, 8, 8)
    make_private(user, job, model, public, private)
    for command, arguments in COMMANDS.items():
        done = user.csdctl(command, *arguments)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    trained = [json.loads(line) for line in (user.home / ".csdctl/ledger.jsonl").read_text().splitlines()]
    assert {entry["kind"] for entry in trained} >= {"code", "model", "gradient"}
    wider = wider_than_its_owner(user.home)
    assert not wider, "\n".join(wider)
    assert {path.stat().st_uid for path in user.home.rglob("*")} == {user.uid}
