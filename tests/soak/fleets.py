"""The fleets that are soaked: what runs where, and the faults that each of them can have."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from csdctl.worker.protocol.processes import load_stat
from tests.emulated.running import emulated, home_of
from tests.emulated.training import of_fleet, processes, processes_of
from tests.lab.lab import Lab, open_lab
from tests.lab.machines import INTERFACE, LabNode
from tests.lab.network import clear_link, limit_bandwidth, list_processes
from tests.lab.project import Project

Fault = Callable[[str], AbstractContextManager[object]]
"""A fault of a node, which lasts as long as the block."""


class SoakFleet:
    """A host and nodes that train in `project`."""

    nodes: tuple[str, ...]
    faults: dict[str, Fault]
    """The faults that only this kind of fleet can have, by name."""

    def __init__(self, project: Path) -> None:
        self.project = project

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a command on the host, in the project."""
        raise NotImplementedError

    def home(self, node: str) -> Path:
        """Return a node's home directory, as this machine sees it."""
        raise NotImplementedError

    def daemons(self) -> list[int]:
        """Return the daemons of mpirun on nodes."""
        raise NotImplementedError

    def logins(self) -> list[int]:
        """Return the processes of SSH servers that serve one connection each."""
        raise NotImplementedError

    def on_machine(self, node: str) -> list[int]:
        """Return the processes of csdctl on a node."""
        raise NotImplementedError

    def kinds(self, run: Path, csdctl: int) -> dict[str, list[int]]:
        """Return the processes of a run by what they are."""
        nodes, host = self.nodes, processes_of(run, "host", "python", " rank --spec")
        ranks = [pid for node in nodes for pid in processes_of(run, node, "python", " rank --spec")]
        return {
            "csdctl": [csdctl],
            "rank 0": host,
            "rank of a node": ranks,
            "parent of a node's rank": [stat.parent for pid in ranks if (stat := load_stat(pid))],
            "hub": processes_of(run, "host", "python", " hub "),
            "mpirun": processes_of(run, "", "prterun"),
            "daemon of mpirun": self.daemons(),
            "link on the host": processes_of(run, "host", "python", " link --rank"),
            "link on a node": [
                p for node in nodes for p in processes_of(run, node, "python", " link --rank")
            ],
            "SSH connection": self.logins(),
        }

    def working_directories(self, run: Path) -> dict[int, Path]:
        """Return the working directory of each rank that runs, as this machine sees it."""
        places = {}
        for number, node in enumerate(("host", *self.nodes)):
            for pid in processes_of(run, node, "python", " rank --spec"):
                with contextlib.suppress(OSError):
                    places[number] = self.seen(node, Path(os.readlink(f"/proc/{pid}/cwd")))
        return places

    def seen(self, node: str, path: Path) -> Path:
        """Return a path on a node as this machine sees it."""
        return path

    def left(self, run: Path) -> list[str]:
        """Return what of a run still runs."""
        pids = [*processes(f"csdctl-run={run.name}"), *self.daemons()]
        return [f"{pid}: {command_line(pid)}" for pid in pids]


class EmulatedFleet(SoakFleet):
    """Nodes of `csdctl emulate`."""

    nodes = ("csd0", "csd1", "csd2")
    faults: dict[str, Fault] = {}

    def start(self, *command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def home(self, node: str) -> Path:
        return home_of(self.project, node)

    def daemons(self) -> list[int]:
        return of_fleet(processes("prted"), self.project, "prted")

    def logins(self) -> list[int]:
        return []  # a connection is no process there

    def on_machine(self, node: str) -> list[int]:
        return of_fleet(processes("csdctl"), self.project, "python", node)


class LabFleet(SoakFleet):
    """Nodes of the lab: network namespaces, each with OpenSSH's server, a home and a cable of its own."""

    nodes = ("csd0", "csd1", "csd2")

    def __init__(self, lab: Lab, project: Path) -> None:
        super().__init__(project)
        self.lab, self._project = lab, Project(lab, project)
        self._project.use(*lab.near, network="10.77.0.0/24")
        self.faults = {
            "cable pulled": lambda node: self.node(node).cable_pulled(),
            "packets swallowed": lambda node: self.node(node).packets_swallowed(),
            "machine frozen": lambda node: self.node(node).frozen(),
            "SSH server stopped": lambda node: self.node(node).server_stopped(),
            "node rebooted": lambda node: self.node(node).switched_off(),
            "link of 1 Mbit/s": lambda node: limited(self.node(node)),
            "1 of 10 packets lost": lambda node: self.node(node).packets_lost(10),
        }

    def node(self, name: str) -> LabNode:
        return self.lab.nodes[name]

    def start(self, *command: str) -> "subprocess.Popen[str]":
        return self.lab.host.start(*command, cwd=self.project)

    def home(self, node: str) -> Path:
        return self.lab.directory / node / "home"

    def seen(self, node: str, path: Path) -> Path:
        return path if node == "host" else self.home(node) / path.relative_to("/root")

    def daemons(self) -> list[int]:
        return [pid for node in self.nodes for pid in self._named(node, "prted")]

    def logins(self) -> list[int]:
        return [pid for node in self.nodes for pid in self._named(node, "sshd: root@")]

    def on_machine(self, node: str) -> list[int]:
        return self._named(node, "csdctl")

    def _named(self, node: str, word: str) -> list[int]:
        pids = list_processes(self.node(node).namespace)
        return [pid for pid in pids if word in command_line(pid)]


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


@contextmanager
def limited(node: LabNode) -> Iterator[None]:
    limit_bandwidth(node.namespace, INTERFACE, 1)
    try:
        yield
    finally:
        clear_link(node.namespace, INTERFACE)


@contextmanager
def open_fleet(kind: str, project: Path) -> Iterator[SoakFleet]:
    """Keep a fleet of a kind up: 'emulated' or 'lab'."""
    with ExitStack() as stack:
        if kind == "lab":
            yield LabFleet(stack.enter_context(open_lab()), project)
        else:
            stack.enter_context(emulated(project, len(EmulatedFleet.nodes)))
            yield EmulatedFleet(project)


def signal_processes(pids: list[int], name: str) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[name])
