"""Commands other than training under faults: after each, the same command works and gives the same result."""

import contextlib
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.patience import communicate
from tests.soak.fleets import SoakFleet, signal_processes

CSDCTL = str(Path(sys.prefix) / "bin" / "csdctl")
TREE_BYTES, NUM_FILES = 200_000, 20
MAX_DELAY_S = 6.0
"""Latest start of a fault."""
MAX_FAULT_S = 8.0


@dataclass
class Command:
    """A command that is disturbed. `change` gives it work, `result` returns what it has done."""

    arguments: tuple[str, ...]
    change: Callable[[int], object]
    result: Callable[[str], object]


class Commands:
    """The commands of a project whose `latest` run has a model."""

    def __init__(
        self, fleet: SoakFleet, chosen: random.Random, write_private: Callable[[Path, int], None]
    ) -> None:
        """`write_private` writes private data of this number of samples."""
        self.fleet, self.chosen, self._write_private = fleet, chosen, write_private
        self.problems: list[str] = []
        self.codes: dict[str, list[int]] = {}
        """Exit codes of the disturbed commands."""
        self._tree = fleet.project / "tree"
        predictions = str(fleet.project / "predictions.npz")
        predict = ("predict", "latest", "--on", "all", "--force", "-o", predictions, "--json")
        self.commands = {
            "prepare": Command(("prepare", "--json"), self._change_private, self._read_prepared),
            "deploy": Command(("deploy", "--tree", "tree:there"), self._change_tree, self._read_trees),
            "exec": Command(
                ("exec", "--", "sh", "-c", "sleep 3; echo done"), id, lambda said: "done" in said
            ),
            "predict": Command(predict, id, lambda said: hash_archive(Path(predictions))),
            "tune": Command(("tune", "--fresh", "--probe-seconds", "0.1"), id, lambda said: "plan" in said),
        }

    def _change_private(self, number: int) -> None:
        for node in self.fleet.nodes:
            self._write_private(self.fleet.home(node) / "private.npz", 60 + number)

    def _read_prepared(self, said: str) -> object:
        return {name: value for name, value in json.loads(said).items() if name != "time"}

    def _change_tree(self, number: int) -> None:
        self._tree.mkdir(exist_ok=True)
        generator = np.random.default_rng(number)
        for file in range(NUM_FILES):
            (self._tree / f"file {file}").write_bytes(generator.bytes(TREE_BYTES))

    def _read_trees(self, said: str) -> object:
        places = {node: Path(os.readlink(self.fleet.home(node) / "there")) for node in self.fleet.nodes}
        sent = [hash_tree(self.fleet.seen(node, path)) for node, path in places.items()]
        assert set(sent) == {hash_tree(self._tree)}, "the nodes have another tree"
        return True

    def disturb(self, seconds: float) -> None:
        """Disturb commands in turn until the time is over, each at least once but for `tune`."""
        end, number = time.monotonic() + seconds, 0
        names = list(self.commands)
        while time.monotonic() < end or number < len(names) - 1:
            name = names[number % len(names)]
            number += 1
            try:
                self._disturb(name, self.commands[name], number)
            except (AssertionError, ValueError, OSError) as error:
                self.problems.append(f"{name} in round {number}: {error}"[:3000])

    def _disturb(self, name: str, command: Command, number: int) -> None:
        command.change(number)
        process = self.fleet.start(CSDCTL, *command.arguments)
        time.sleep(self.chosen.uniform(0, MAX_DELAY_S))
        kind = "none"
        with ExitStack() as stack:
            if process.poll() is None:
                kind = stack.enter_context(self._fault(process.pid))
                time.sleep(self.chosen.uniform(0, MAX_FAULT_S) if "killed" not in kind else 0)
        said = "".join(communicate(process, self.fleet.project))
        self.codes.setdefault(f"{name}, {kind}", []).append(process.returncode)
        assert "Traceback" not in said, said[-2000:]
        print(f"{name}: {kind}: exit code {process.returncode}", file=sys.stderr, flush=True)
        results = []
        for _ in range(2):  # the second one has nothing left to do
            process = self.fleet.start(CSDCTL, *command.arguments)
            output, errors = communicate(process, self.fleet.project)
            assert process.returncode == 0, f"after {kind}: {output[-500:]}{errors[-2000:]}"
            results.append(command.result(output))
        assert results[0] == results[1], f"after {kind}: {results[0]}, then {results[1]}"

    @contextmanager
    def _fault(self, csdctl: int) -> Iterator[str]:
        """Disturb csdctl or a node; yield the name of the fault."""
        node = self.chosen.choice(self.fleet.nodes)
        kinds = ["csdctl killed", "csdctl stopped", "processes of a node killed", *self.fleet.faults]
        kind = self.chosen.choice(kinds)
        with contextlib.ExitStack() as stack:
            if kind == "csdctl stopped":
                signal_processes([csdctl], "SIGSTOP")
                stack.callback(signal_processes, [csdctl], "SIGCONT")
            elif kind == "csdctl killed":
                signal_processes([csdctl], "SIGKILL")
            elif kind == "processes of a node killed":
                signal_processes(self.fleet.on_machine(node), "SIGKILL")
            else:
                stack.enter_context(self.fleet.faults[kind](node))
            yield kind


def hash_archive(path: Path) -> str:
    """Return a hash of the arrays of an .npz file."""
    with np.load(path, allow_pickle=False) as archive:
        arrays: Mapping[str, Any] = {name: archive[name] for name in sorted(archive.files)}
        return hashlib.sha256(repr([(name, a.tobytes()) for name, a in arrays.items()]).encode()).hexdigest()


def hash_tree(directory: Path) -> str:
    """Return a hash of the names and contents of all files below a directory."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(repr((path.relative_to(directory), path.read_bytes())).encode())
    return digest.hexdigest()
