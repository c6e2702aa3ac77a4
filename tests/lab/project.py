"""A user's directory on the lab's host, and csdctl as the user runs it."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from csdctl.fleet.model import Node
from tests.lab.lab import Lab
from tests.lab.machines import LabNode

CSDCTL = Path(sys.prefix) / "bin" / "csdctl"


@dataclass
class Project:
    """A directory that a user works in, on the lab's host."""

    lab: Lab
    path: Path

    def write_fleet(self, *nodes: LabNode | Node, name: str = "fleet.yaml", **top: Any) -> Path:
        """A fleet file for `nodes`, all at their own ports; `top` are further keys of the file."""
        entries = [_entry(one.node if isinstance(one, LabNode) else one) for one in nodes]
        (self.path / name).write_text(yaml.safe_dump({**top, "nodes": entries}))
        return self.path / name

    def know(self, *nodes: LabNode) -> None:
        """Have the keys that `nodes` show now as the known ones, and no others."""
        (self.path / ".csdctl").mkdir(exist_ok=True)
        lines = [node.known_hosts_line for node in nodes]
        (self.path / ".csdctl" / "known_hosts").write_text("".join(lines))

    def use(self, *nodes: LabNode, **top: Any) -> None:
        """A fleet of `nodes`, their keys known."""
        self.write_fleet(*nodes, **top)
        self.know(*nodes)

    def csdctl(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run csdctl as a user would; whatever happens, it never shows a traceback."""
        done = self.lab.host.run(str(CSDCTL), *arguments, cwd=self.path, **how)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.lab.host.start(str(CSDCTL), *arguments, cwd=self.path)

    def discover(self, *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        """Exit code, what is told of each machine, and standard error of `discover --json`."""
        done = self.csdctl("discover", "--json", *arguments)
        machines = json.loads(done.stdout)["machines"] if done.stdout else []
        return done.returncode, {machine["name"]: machine for machine in machines}, done.stderr


def _entry(node: Node) -> dict[str, Any]:
    values = {"name": node.name, "address": node.address, "port": node.port, "user": node.user}
    return {**values, "key": str(node.key), "python": node.python}
