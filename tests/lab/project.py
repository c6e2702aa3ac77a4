"""A project directory on the lab's host, and csdctl as a user runs it."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from csdctl.fleet.model import Node
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.patience import communicate

CSDCTL = Path(sys.prefix) / "bin" / "csdctl"


@dataclass
class Project:
    """A user's project directory on the lab's host."""

    lab: Lab
    path: Path

    def write_fleet(self, *nodes: LabNode | Node, name: str = "fleet.yaml", **top: Any) -> Path:
        """Write a fleet file for `nodes`; `top` are more top-level keys."""
        entries = [_entry(node.node if isinstance(node, LabNode) else node) for node in nodes]
        (self.path / name).write_text(yaml.safe_dump({**top, "nodes": entries}))
        return self.path / name

    def trust(self, *nodes: LabNode) -> None:
        """Make the current keys of `nodes` the only known host keys."""
        (self.path / ".csdctl").mkdir(exist_ok=True)
        lines = [node.known_hosts_line for node in nodes]
        (self.path / ".csdctl" / "known_hosts").write_text("".join(lines))

    def use(self, *nodes: LabNode, **top: Any) -> None:
        """Write a fleet of `nodes` with known keys."""
        self.write_fleet(*nodes, **top)
        self.trust(*nodes)

    def csdctl(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run csdctl as a user would; it must never print a traceback."""
        done = self.lab.host.run(str(CSDCTL), *arguments, cwd=self.path, **how)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

    def succeed(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run csdctl, which must succeed."""
        done = self.csdctl(*arguments, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def refuse(self, *arguments: str, code: int) -> str:
        """Run csdctl, which must end with `code`; return what it has printed."""
        done = self.csdctl(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def interrupt(self, process: subprocess.Popen[str]) -> str:
        """Press Ctrl-C, which must end csdctl in order; return what it has printed."""
        process.send_signal(signal.SIGINT)
        printed = "".join(communicate(process, self.path))
        assert process.returncode == 130, printed
        assert "Traceback" not in printed
        return printed

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.lab.host.start(str(CSDCTL), *arguments, cwd=self.path)

    def discover(self, *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        """Run `discover --json`; return exit code, machines by name, and standard error."""
        done = self.csdctl("discover", "--json", *arguments)
        machines = json.loads(done.stdout)["machines"] if done.stdout else []
        return done.returncode, {machine["name"]: machine for machine in machines}, done.stderr


def _entry(node: Node) -> dict[str, Any]:
    values = {"name": node.name, "address": node.address, "port": node.port, "user": node.user}
    return {**values, "key": str(node.key), "python": node.python, "env": dict(node.env), "state": node.state}
