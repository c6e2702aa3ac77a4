"""Run csdctl as an ordinary user, also where the tests run as root."""

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import csdctl

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

    def own(self, path: Path) -> Path:
        """Give `path` to the user."""
        os.chown(path, self.uid, self.gid)
        return path

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
