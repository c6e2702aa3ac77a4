"""Where sample data comes from: the first of several sources, among them Debian's packages.

A package is unpacked into a temporary directory: that needs no root and installs nothing.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from csdctl.errors import CsdctlError, InputError
from csdctl.notify import Say
from csdctl.transport.commands import build_child_command

T = TypeVar("T")

APT_DEADLINE_S = 600.0


@dataclass(frozen=True)
class DatasetOrigin:
    """A possible source of a sample; `find` returns the directory of its files or raises CsdctlError.

    `find` gets a scratch directory, which is removed after the files have been read.
    """

    name: str
    find: Callable[[Path, Say], Path]


@dataclass(frozen=True)
class DebianPackage:
    """A sample in one of Debian's packages."""

    sample: str
    name: str
    directory: Path
    """Where it is when the package is installed."""
    num_megabytes: int

    def download(self, scratch: Path, say: Say) -> Path:
        """Download the package and unpack it below `scratch`; returns the directory, raises CsdctlError."""
        for command in ("apt-get", "dpkg"):
            if not shutil.which(command):
                raise CsdctlError(f"{command} is not installed here")
        say(
            f"downloading {self.sample}: apt-get download {self.name} "
            f"({self.num_megabytes} MB, nothing is installed)"
        )
        download = ["apt-get", "download", "--quiet", self.name]
        try:
            run_program(download, scratch, APT_DEADLINE_S)
        except CsdctlError as error:
            if os.geteuid() != 0:
                raise CsdctlError(f"{error.message} (`sudo apt-get update` may help)") from None
            say("apt does not find the package: running apt-get update")
            run_program(["apt-get", "update", "--quiet"], scratch, APT_DEADLINE_S)
            run_program(download, scratch, APT_DEADLINE_S)
        for package in scratch.glob("*.deb"):
            run_program(["dpkg", "-x", package.name, "."], scratch, APT_DEADLINE_S)
        return scratch / self.directory.relative_to("/")


def load_first(
    sample: str,
    sources: Iterable[DatasetOrigin],
    load: Callable[[DatasetOrigin, Path], T],
    say: Say,
    *,
    remedy: str,
) -> T:
    """Return what `load` makes of the first complete source.

    `say` gets messages about slow steps and failures. Raises CsdctlError, listing all sources.
    """
    tried = []
    for source in sources:
        with tempfile.TemporaryDirectory(prefix="csdctl-sample-") as scratch:
            try:
                return load(source, source.find(Path(scratch), say))
            except CsdctlError as error:
                tried.append(f"{source.name}: {error.message}")
                if isinstance(error, InputError):
                    say(f"{error.message}; trying other sources")
    raise CsdctlError(
        f"{sample} was not found and could not be downloaded. Sources:\n"
        + "\n".join(f"  - {line}" for line in tried),
        remedy=remedy,
    )


def run_program(command: Sequence[str], directory: Path, deadline_s: float) -> None:
    """Run `command` in `directory`; it ends with csdctl. Raises CsdctlError with its last line of output."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            build_child_command(command, os.getpid()),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=deadline_s,
            check=False,
            env={**os.environ, "LC_ALL": "C", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    except subprocess.TimeoutExpired:
        raise CsdctlError(f"{name} took longer than {deadline_s:.0f} s") from None
    except OSError as error:
        raise CsdctlError(f"{name} cannot be run: {error}") from None
    if done.returncode != 0:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        raise CsdctlError(f"{name} ended with {done.returncode}: {lines[-1] if lines else 'no output'}")
