"""A fleet for supervision without machines: ranks that follow a script, small commands in place of mpirun.

A rank answers an order at once, in the thread that sends it, so a test defines what happens in which order.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import CsdctlError, NodeError, RunError, UnreachableError
from csdctl.launch.mpi_job import MpiJob
from csdctl.supervision.rank_processes import OnMessage, ProcessEnded, RankMessage
from csdctl.supervision.run_setup import Links, Patience, RunSetup
from csdctl.supervision.supervisor import Supervisor
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.events import (
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    Misbehaved,
    NodeLost,
    Paused,
    Pong,
    Progress,
    Ready,
    WaitingFor,
)
from csdctl.worker.protocol.orders import FormGroup, Order, PauseAtEpochEnd, Ping, Stop
from tests.patience import eventually, scaled

SLEEPING = ["/bin/sleep", "100000"]
"""An mpirun that runs until it is ended."""
NO_DAEMONS: Any = None
"""Such an mpirun asks for none."""
SHORT_PATIENCE = Patience(
    start_s=3600.0,
    silence_s=3600.0,
    answer_s=scaled(0.6),
    min_answer_s=scaled(0.3),
    stall_s=scaled(0.3),
    ping_interval_s=0.05,
    settle_s=scaled(0.05),
    poll_s=0.02,
    exit_s=scaled(0.6),
    mpirun_exit_s=scaled(0.3),
    restart_interval_s=0.01,
)
"""Scripted ranks do at once what they do. The limits allow for a busy machine, which may hold up the
supervisor between two messages that have both arrived.
"""


def shell(script: str) -> list[str]:
    """Return the command of an mpirun that runs `script`."""
    return ["/bin/sh", "-c", script]


class ScriptedRank:
    """One process of a rank, in place of a `RankProcess`."""

    def __init__(self, fleet: "Fleet", rank: int) -> None:
        self.fleet, self.rank, self.node = fleet, rank, fleet.nodes[rank]
        self.orders: list[Order] = []
        self.is_closed = self.is_hung = self.has_exited = False
        self.group: FormGroup | None = None
        self.has_joined = self.is_pausing = self.is_stopping = False
        self.answered = 0
        """The number of the latest ping that was answered."""

    def listen(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self.fleet.on_start(self)

    def send(self, order: Order) -> None:
        self.orders.append(order)
        if self.has_exited or self.is_hung:
            return
        if isinstance(order, FormGroup):
            self.group, self.has_joined, self.is_pausing = order, False, False
            if self.rank not in self.fleet.never_join:
                self.join(order)
        elif isinstance(order, Ping):
            self.report(Pong(self.rank, self.node, order.number))
            self.answered = order.number
        elif isinstance(order, Stop):
            self.is_stopping = True
        elif isinstance(order, PauseAtEpochEnd) and self.has_joined:
            # A rank that has not joined its group yet forgets the pause: every group starts without one.
            self.is_pausing = True
        self.fleet.continue_script(self, order)

    def close(self) -> None:
        self.is_closed = True

    def report(self, *messages: RankMessage) -> None:
        """Print messages, unless the process is closed."""
        if not self.is_closed:
            for message in messages:
                self._on_message(message)

    def report_ready(self) -> None:
        self.report(Ready(self.rank, self.node, 100))

    def join(self, group: FormGroup) -> None:
        sizes = {str(rank): 8 for rank in group.ranks}
        self.report(Joined(self.rank, self.node, group.generation, 1, 0, 10, 0, sizes, "star", 0.001))

    def step(self, number: int = 1) -> None:
        self.report(Progress(self.rank, self.node, 1, number, 1, 8, 0.1, 0.1, 0.2))

    def lose_link(self, generation: int) -> None:
        self.report(LinkLost(self.rank, self.node, generation, 1, 3))

    def wait_for(self, *nodes: str) -> None:
        self.report(WaitingFor(self.rank, self.node, nodes))

    def accuse(self, culprit: int) -> None:
        self.report(Misbehaved(self.rank, self.node, culprit, "sent 20 bytes, expected 100"))

    def end_epoch(self) -> None:
        self.report(EpochEnd(self.rank, self.node, 1, 10, 80, 1.0, 0.1, 1.1, "hash"))

    def pause(self) -> None:
        assert self.group
        self.report(Paused(self.rank, self.node, self.group.generation))

    def finish(self) -> None:
        self.report(Finished(self.rank, self.node, 1, 10, "hash", 1 << 20))

    def fail(self, message: str, *, remedy: str = "", exit_code: int = 1) -> None:
        """Fail as a rank does: report the failure, then exit."""
        self.report(Failed(self.rank, self.node, message, remedy, exit_code))
        self.exit(f"rank {self.rank} exited with code {exit_code}")

    def exit(self, reason: str = "", *, is_clean: bool = False, why: type[CsdctlError] = NodeError) -> None:
        self.has_exited = True
        error = why(reason or f"rank {self.rank} was killed by signal 15", node=self.node)
        self.report(ProcessEnded(self.rank, self.node, error, is_clean))


Script = Callable[["Fleet"], None]


class Fleet:
    """A host and its nodes; `scripts` holds what happens in the group of each generation."""

    def __init__(self, directory: Path, num_nodes: int = 2) -> None:
        self.directory = directory
        self.nodes = ["host", *(f"csd{number}" for number in range(num_nodes))]
        self.processes: list[ScriptedRank] = []
        self.on_start: Callable[[ScriptedRank], None] = ScriptedRank.report_ready
        """What a rank's process does when it is started."""
        self.scripts: dict[int, Script] = {}
        self.on_order: Callable[[ScriptedRank, Order], None] = lambda rank, order: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self.has_short_epochs = True
        """Whether an epoch ends as soon as a pause is requested."""
        self.never_join: set[int] = set()
        self.reachable: set[int] = set()
        """Ranks with a machine that answers when they are restarted."""
        self.may_restart: Callable[[int], bool] = self._is_training_without
        """Whether a reachable rank may be restarted now."""
        self.mpirun: dict[int, list[str]] = {}
        self.links_type: type[Links] = Links
        self.linked: list[tuple[int, ...]] = []
        """The groups for which mpirun was started."""
        self.min_nodes = 0
        self.is_resumable = True
        self.absent: tuple[int, ...] = ()
        self.servers: tuple[int, ...] = ()
        """The rank of the server of each rank; by default rank 0."""
        self.should_stop = False
        self.patience = SHORT_PATIENCE
        self.events: list[Event] = []

    def set_patience(self, **limits: float) -> None:
        self.patience = replace(self.patience, **limits)

    def rank(self, rank: int) -> ScriptedRank:
        """Return the newest process of a rank."""
        return next(process for process in reversed(self.processes) if process.rank == rank)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The groups in the order in which rank 0 was ordered to form them."""
        of_rank_0 = [process for process in self.processes if process.rank == 0]
        return [order.ranks for process in of_rank_0 for order in orders_of(process, FormGroup)]

    def members(self) -> list[ScriptedRank]:
        group = self.rank(0).group
        assert group
        return [self.rank(rank) for rank in group.ranks]

    def nodes_of(self, event_type: type[Event]) -> list[str]:
        """Return the nodes of all events of this type, in order."""
        return [event.node for event in self.events if isinstance(event, event_type)]

    def lost_messages(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, NodeLost)]

    def supervise(self) -> Supervisor:
        setup = RunSetup(
            run_id="20261122-100000",
            nodes=self.nodes,
            start_rank=self._start,
            restart_rank=self._restart,
            start_links=self._start_links,
            log_directory=self.directory,
            is_resumable=self.is_resumable,
            min_nodes=self.min_nodes,
            patience=self.patience,
            absent=self.absent,
            servers=self.servers,
            should_stop=lambda: self.should_stop,
        )
        return Supervisor(setup, self._record)

    def run(self) -> None:
        self.supervise().run()

    def run_to_error(self, error_type: type[CsdctlError] = RunError) -> CsdctlError:
        """Return the error that ends the run, which must have exactly this type."""
        with pytest.raises(CsdctlError) as caught:
            self.run()
        assert type(caught.value) is error_type
        return caught.value

    def continue_script(self, rank: ScriptedRank, order: Order) -> None:
        """Continue after an order: the script of a group starts when all members know the group."""
        self.on_order(rank, order)
        if isinstance(order, FormGroup) and rank.rank == order.ranks[-1]:
            self.scripts.get(order.generation, lambda fleet: None)(self)
        if rank.rank == 0 and rank.is_pausing and self.has_short_epochs:
            self.end_epoch()

    def end_epoch(self) -> None:
        """End the epoch, and the group with it if rank 0 received a request to pause."""
        for member in self.members():
            member.end_epoch()
        if self.rank(0).is_pausing:
            for member in self.members():
                member.pause()

    def finish(self) -> None:
        """Let all members of the group finish and exit."""
        for member in self.members():
            member.finish()
            member.exit(is_clean=True)

    def _record(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Joined):
            self.rank(event.rank).has_joined = True
        self.on_event(event)

    def _start(self, rank: int) -> ScriptedRank:
        process = ScriptedRank(self, rank)
        self.processes.append(process)
        return process

    def _restart(self, rank: int) -> ScriptedRank:
        if rank not in self.reachable or not self.may_restart(rank):
            raise UnreachableError("does not answer", node=self.nodes[rank])
        return self._start(rank)

    def _is_training_without(self, rank: int) -> bool:
        """Rank 0 restarts at once, as no group trains without it; the others while a group trains."""
        members = self.members()
        return rank == 0 or all(member.rank != rank and member.has_joined for member in members)

    def _start_links(self, ranks: Sequence[int], generation: int) -> Links:
        self.linked.append(tuple(ranks))
        # As csdctl starts it: one stream of output.
        command = ["sh", "-c", 'exec "$@" 2>&1', "mpirun", *self.mpirun.get(generation, SLEEPING)]
        nodes = [self.nodes[rank] for rank in ranks]
        session = LocalSession("host", self.directory)
        job = MpiJob(lambda: session.converse(command), nodes, self._log_path, NO_DAEMONS, sandbox_s=0.1)
        return self.links_type(job)

    def _log_path(self, rank: int | None) -> Path:
        return self.directory / ("mpirun.log" if rank is None else f"rank-{rank}.log")

    def assert_nothing_left(self) -> None:
        """Check that no process of a rank is open, no restart is attempted and no mpirun runs."""
        left = [one.rank for one in self.processes if not (one.is_closed or one.has_exited)]
        assert not left, f"not closed: ranks {left}"
        for thread in threading.enumerate():
            if thread.name.startswith("restart rank"):
                assert eventually(lambda one=thread: not one.is_alive()), "a rank is still being restarted"
        # Killed processes take a moment to disappear.
        assert eventually(lambda: not _list_processes(self.directory)), "an mpirun still runs"


def orders_of(rank: ScriptedRank, order_type: type[Order]) -> list[Any]:
    return [order for order in rank.orders if isinstance(order, order_type)]


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def _list_processes(directory: Path) -> list[int]:
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(directory):
                found.append(int(link.parent.name))
    return found
