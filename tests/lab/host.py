"""The lab's host: the machine that csdctl runs on."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.lab import network
from tests.lab.network import DIES_WITH_PARENT
from tests.patience import communicate


class LabHost:
    """The machine that csdctl runs on: shares the file system, with its own network and hostname."""

    name = "labhost"

    def __init__(self, lab: str, directory: Path) -> None:
        self.namespace = f"{lab}-host"
        self.directory = directory / "host"
        for part in ("home/.ssh", "tmp"):
            (self.directory / part).mkdir(parents=True)
        network.make_namespace(self.namespace)

    def start(
        self, *command: str, cwd: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `command` there as a process group leader, which receives the signals."""
        return subprocess.Popen(
            self._build_command(command),
            cwd=cwd,
            env=self.environment() | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(
        self, *command: str, cwd: Path, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` there to completion; raises StalledError."""
        process = self.start(*command, cwd=cwd, environment=environment)
        stdout, stderr = communicate(process, cwd)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def _build_command(self, command: Sequence[str]) -> list[str]:
        return [
            *DIES_WITH_PARENT,
            *("nsenter", f"--net={network.NAMESPACES / self.namespace}"),
            *("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command),
        ]

    def environment(self) -> dict[str, str]:
        """Return the variables of commands there."""
        dropped = ("CSDCTL_", "SSH_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        home, temporary = self.directory / "home", self.directory / "tmp"
        return inherited | {"HOME": str(home), "TMPDIR": str(temporary), "NO_COLOR": "1", "COLUMNS": "200"}
