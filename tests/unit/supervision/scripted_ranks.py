"""A fleet for supervision without machines: ranks that follow a script, small commands in mpirun's place.

A rank answers an order at once, in the thread that gives it, so a test says what happens and in which order.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import NodeError, UnreachableError
from csdctl.launch.rank_process import ProcessEnded, RankMessage
from csdctl.supervision.supervisor import SupervisedRun, Supervisor
from csdctl.worker.protocol.events import (
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    Paused,
    Pong,
    Progress,
    Ready,
    WaitingFor,
)
from csdctl.worker.protocol.orders import FormGroup, Order, PauseAtEpochEnd, Ping, Stop

SLEEPING = ["/bin/sleep", "60"]
"""An mpirun that runs until it is ended."""


def shell(script: str) -> list[str]:
    """An mpirun that does what `script` says."""
    return ["/bin/sh", "-c", script]


@dataclass(frozen=True)
class Waits:
    """In place of `Deadlines`, which allows no fractions of a second."""

    start_s: float = 30.0
    silence_s: float = 30.0


Hear = Callable[[RankMessage], None]


class ScriptedRank:
    """One process of a rank, in place of a `RankProcess`."""

    def __init__(self, fleet: "Fleet", rank: int, hear: Hear) -> None:
        self.fleet, self.rank, self.node = fleet, rank, fleet.nodes[rank]
        self.orders: list[Order] = []
        self.is_closed = self.is_deaf = self.has_ended = False
        self.group: FormGroup | None = None
        self.has_joined = self.is_pausing = self.is_stopping = False
        self._hear = hear

    def order(self, order: Order) -> None:
        self.orders.append(order)
        if self.has_ended or self.is_deaf:
            return
        if isinstance(order, FormGroup):
            self.group, self.has_joined, self.is_pausing = order, False, False
            if self.rank not in self.fleet.never_join:
                self.join(order)
        elif isinstance(order, Ping):
            self.say(Pong(self.rank, self.node, order.number))
        elif isinstance(order, Stop):
            self.is_stopping = True
        elif isinstance(order, PauseAtEpochEnd) and self.has_joined:
            # A rank that has not taken its group yet forgets the pause: it begins anew with every group.
            self.is_pausing = True
        self.fleet.go_on(self, order)

    def close(self) -> None:
        self.is_closed = True

    def say(self, *notices: RankMessage) -> None:
        """What the process prints; nothing comes from one that is closed."""
        if not self.is_closed:
            for notice in notices:
                self._hear(notice)

    def be_ready(self) -> None:
        self.say(Ready(self.rank, self.node, 100, 0.1))

    def join(self, group: FormGroup) -> None:
        sizes = {str(rank): 8 for rank in group.ranks}
        self.say(Joined(self.rank, self.node, group.generation, 1, 0, 10, 0, sizes, "star", 0.001))

    def step(self) -> None:
        self.say(Progress(self.rank, self.node, 1, 1, 1, 8, 0.1, 0.1, 0.2))

    def lose_link(self, generation: int) -> None:
        self.say(LinkLost(self.rank, self.node, generation, 1, 3))

    def wait_for(self, *nodes: str) -> None:
        self.say(WaitingFor(self.rank, self.node, nodes))

    def end_epoch(self) -> None:
        self.say(EpochEnd(self.rank, self.node, 1, 10, 80, 1.0, 0.1, 1.1, "hash"))

    def pause(self) -> None:
        assert self.group
        self.say(Paused(self.rank, self.node, self.group.generation))

    def finish(self) -> None:
        self.say(Finished(self.rank, self.node, 1, 10, "hash", 1 << 20))

    def fail(self, message: str, *, remedy: str = "", exit_code: int = 1) -> None:
        """Give up as a rank does: it says so, and leaves."""
        self.say(Failed(self.rank, self.node, message, remedy, exit_code))
        self.end(f"rank {self.rank} ended with exit code {exit_code}")

    def end(self, why: str = "", *, is_clean: bool = False) -> None:
        self.has_ended = True
        error = NodeError(why or f"rank {self.rank} was killed by signal 15", node=self.node)
        self.say(ProcessEnded(self.rank, self.node, error, is_clean))


Story = Callable[["Fleet"], None]


class Fleet:
    """A host and its nodes; `stories` says what happens in the group of each generation."""

    def __init__(self, directory: Path, num_nodes: int = 2) -> None:
        self.directory = directory
        self.nodes = ["host", *(f"csd{number}" for number in range(num_nodes))]
        self.processes: list[ScriptedRank] = []
        self.begin: Callable[[ScriptedRank], None] = ScriptedRank.be_ready
        """What a rank's process does when it is started."""
        self.stories: dict[int, Story] = {}
        self.on_order: Callable[[ScriptedRank, Order], None] = lambda rank, order: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self.has_short_epochs = True
        """Whether an epoch ends as soon as a pause is asked for."""
        self.never_join: set[int] = set()
        self.reachable: set[int] = set()
        """Ranks whose machine is there again when somebody tries."""
        self.may_return: Callable[[int], bool] = self._is_training_without
        """Whether a reachable rank may be started again now."""
        self.mpirun: dict[int, list[str]] = {}
        self.built: list[tuple[int, ...]] = []
        """For which groups mpirun was started."""
        self.min_nodes = 0
        self.absent: tuple[int, ...] = ()
        self.waits = Waits()
        self.events: list[Event] = []
        self.restart: Callable[[int, Hear], ScriptedRank] = self._restart

    def rank(self, rank: int) -> ScriptedRank:
        """Its newest process."""
        return next(one for one in reversed(self.processes) if one.rank == rank)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The groups in the order in which they were formed, as rank 0 was told."""
        return [
            order.ranks
            for process in self.processes
            if process.rank == 0
            for order in process.orders
            if isinstance(order, FormGroup)
        ]

    def members(self) -> list[ScriptedRank]:
        group = self.rank(0).group
        assert group
        return [self.rank(rank) for rank in group.ranks]

    def said(self, kind: type[Event]) -> list[str]:
        """The nodes of all events of this kind, in order."""
        return [event.node for event in self.events if isinstance(event, kind)]

    def supervise(self) -> Supervisor:
        supervised = SupervisedRun(
            nodes=self.nodes,
            start_rank=self._begin,
            restart_rank=self.restart,
            build_links=self._build_links,
            log_path=lambda rank: self.directory / ("mpirun.log" if rank is None else f"rank-{rank}.log"),
            directory=self.directory,
            is_resumable=True,
            min_nodes=self.min_nodes,
            deadlines=self.waits,
            absent=self.absent,
        )
        return Supervisor(supervised, self._record)

    def run(self) -> None:
        self.supervise().run()

    def go_on(self, rank: ScriptedRank, order: Order) -> None:
        """Called with every order a rank has taken: the story of a group begins when all members know it."""
        self.on_order(rank, order)
        if isinstance(order, FormGroup) and rank.rank == order.ranks[-1]:
            self.stories.get(order.generation, lambda fleet: None)(self)
        if rank.rank == 0 and rank.is_pausing and self.has_short_epochs:
            self.end_epoch()

    def end_epoch(self) -> None:
        """The epoch ends, and with it the group when rank 0 was asked for that."""
        for one in self.members():
            one.end_epoch()
        if self.rank(0).is_pausing:
            for one in self.members():
                one.pause()

    def finish(self) -> None:
        """All members of the group have done all steps, and leave."""
        for one in self.members():
            one.finish()
            one.end(is_clean=True)

    def _record(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Joined):
            self.rank(event.rank).has_joined = True
        self.on_event(event)

    def _begin(self, rank: int, hear: Hear) -> ScriptedRank:
        process = ScriptedRank(self, rank, hear)
        self.processes.append(process)
        self.begin(process)
        return process

    def _restart(self, rank: int, hear: Hear) -> ScriptedRank:
        if rank not in self.reachable or not self.may_return(rank):
            raise UnreachableError("does not answer", node=self.nodes[rank])
        return self._begin(rank, hear)

    def _is_training_without(self, rank: int) -> bool:
        """Rank 0 returns at once, as nobody trains without it; the others while a group does."""
        members = self.members()
        return rank == 0 or all(one.rank != rank and one.has_joined for one in members)

    def _build_links(self, ranks: Sequence[int], generation: int) -> list[str]:
        self.built.append(tuple(ranks))
        return self.mpirun.get(generation, SLEEPING)

    def assert_nothing_left(self) -> None:
        """No process of a rank is open, no thread of a return goes on, nothing of an mpirun runs."""
        left = [f"rank {one.rank}" for one in self.processes if not (one.is_closed or one.has_ended)]
        assert not left, f"not closed: {left}"
        for thread in threading.enumerate():
            if thread.name.startswith("bring back"):
                thread.join(timeout=2)
                assert not thread.is_alive(), "a rank is still being brought back"
        assert not processes_in(self.directory), "an mpirun still runs"


def processes_in(directory: Path, patience_s: float = 1.0) -> list[int]:
    """Processes that work in `directory`; what was killed is given this time to be gone."""
    deadline = time.monotonic() + patience_s
    while found := list(_look_for_processes(directory)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return found


def _look_for_processes(directory: Path) -> list[int]:
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(directory):
                found.append(int(link.parent.name))
    return found
