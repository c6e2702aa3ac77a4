"""Ranks of a run as csdctl starts them, with a hub and links, that wait for the test before each step."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from csdctl.worker.protocol.events import Event, Ready, event_from_line
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.orders import Begin, OpenHub, Order, Stop, order_to_line
from csdctl.worker.protocol.run_spec import RunSpec
from tests.linked_ranks import HUB_KEY, LINK_KEY, link
from tests.patience import eventually

PROGRAM = Path(__file__).with_name("joined_ranks_program.py")
ROOT = Path(__file__).parents[4]
FOREVER = 1 << 30


class JoinedRanks:
    """The processes of a run's ranks and their links."""

    def __init__(self, spec: RunSpec, directory: Path, program: Path = PROGRAM) -> None:
        """`spec` has LINK_KEY. Ranks run `program` in `directory`."""
        self._program = program
        self.spec, self.directory = spec, directory
        self.said: list[tuple[int, Any]] = []
        """Events and other lines of each rank, in order of arrival."""
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._readers: list[tuple[int, threading.Thread]] = []
        self._links: dict[int, contextlib.ExitStack] = {}
        (directory / "spec.json").write_text(to_json(spec))
        self.allow(0)

    def __enter__(self) -> "JoinedRanks":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in [*self._processes]:
            self.kill(rank)
        for _, reader in self._readers:
            reader.join()

    def allow(self, num_steps: int) -> None:
        """Let so many steps of the run begin."""
        new = self.directory / "steps.new"
        new.write_text(str(num_steps))
        new.rename(self.directory / "steps")

    def hold(self, rank: int, *position: int) -> None:
        """Let a rank stop in a step, by its epoch and number, before it computes. Or in its next sum."""
        (self.directory / f"hold-{rank}").write_text(repr(position))

    def start(self, rank: int) -> None:
        """Start the process of a rank, until it is ready, and the link of it."""
        num_before = len(self.said)
        process = subprocess.Popen(
            [sys.executable, str(self._program), "spec.json", str(rank)],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes[rank] = process
        reader = threading.Thread(target=self._read, args=(rank, process.stdout))
        self._readers.append((rank, reader))
        reader.start()
        if rank == 0:
            self.order(0, OpenHub(HUB_KEY))
        self.until(lambda: any(isinstance(event, Ready) for event in self.of(rank, num_before)))
        if rank:
            self.start_link(rank)

    def start_link(self, rank: int) -> None:
        self._links[rank] = contextlib.ExitStack()
        self._links[rank].enter_context(link(self.spec.run_id, rank, HUB_KEY, LINK_KEY))

    def _read(self, rank: int, lines: Any) -> None:
        for line in lines:
            event = event_from_line(line)
            if event is not None or line.startswith("{"):
                self.said.append((rank, event or json.loads(line)))

    def order(self, rank: int, order: Order) -> None:
        """Give an order to a rank."""
        stdin = self._processes[rank].stdin
        assert stdin
        stdin.write(order_to_line(order) + "\n")
        stdin.flush()

    def begin(self, *ranks: int) -> None:
        self.order(0, Begin((0, *ranks)))

    def stop(self) -> None:
        self.order(0, Stop())

    def kill(self, rank: int) -> None:
        """Kill the process of a rank, and its link."""
        process = self._processes.pop(rank)
        process.kill()
        process.wait()
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        self._links.pop(rank, contextlib.ExitStack()).close()
        (self.directory / f"hold-{rank}").unlink(missing_ok=True)

    def of(self, rank: int, since: int = 0) -> list[Any]:
        """What a rank has said."""
        return [what for number, what in self.said[since:] if number == rank]

    def events(self, kind: type[Event]) -> list[Any]:
        """Events of all ranks, in order of arrival."""
        return [event for _, event in self.said if isinstance(event, kind)]

    def until(self, condition: Callable[[], object]) -> None:
        assert eventually(condition, lambda: len(self.said)), self.said[-20:]

    def until_exit(self, ranks: Sequence[int]) -> list[int]:
        """Wait until these processes have ended, and what they said is read. Return their exit codes."""
        self.until(lambda: all(self._processes[rank].poll() is not None for rank in ranks))
        for rank, reader in self._readers:
            if rank in ranks:
                reader.join()
        return [self._processes[rank].returncode for rank in ranks]
