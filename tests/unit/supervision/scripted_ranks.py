"""A fleet for supervision without machines: ranks and links that follow a script.

A rank answers an order at once, in the thread that sends it, so a test defines what happens in which order.
Rank 0 reports what its hub would find: who takes part, and who is lost.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.errors import CsdctlError, NodeError, RunError, UnreachableError
from csdctl.launch.mpi_job import JobOutcome
from csdctl.supervision.rank_processes import OnMessage, ProcessEnded, RankMessage
from csdctl.supervision.run_setup import Conditions, Patience
from csdctl.supervision.supervisor import Supervisor
from csdctl.worker.protocol import events
from csdctl.worker.protocol.orders import Begin, Order, Ping, Stop
from csdctl.worker.protocol.run_spec import CHECK
from tests.patience import scaled

SHORT_PATIENCE = Patience(
    start_s=3600.0,
    link_s=3600.0,
    silence_s=3600.0,
    stall_s=scaled(0.3),
    ping_interval_s=0.05,
    poll_s=0.02,
    exit_s=scaled(0.6),
    restart_interval_s=0.01,
    cause_s=scaled(0.2),
    relink_s=0.01,
    renew_s=3600.0,
)
"""Scripted ranks do at once what they do. The limits allow for a busy machine, which may hold up the
supervisor between two messages that have both arrived.
"""


class ScriptedRank:
    """One process of a rank, in place of a `RankProcess`."""

    def __init__(self, fleet: "Fleet", rank: int) -> None:
        self.fleet, self.rank, self.node = fleet, rank, fleet.nodes[rank]
        self.orders: list[Order] = []
        self.validator = SimpleNamespace(forget_epochs=lambda: None)
        self.is_closed = self.is_hung = self.has_exited = False

    def listen(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self.fleet.on_start(self)

    def send(self, order: Order) -> None:
        self.orders.append(order)
        if self.has_exited or self.is_hung:
            return
        if isinstance(order, Ping):
            self.report(events.Pong(self.rank, self.node, order.number))
        elif isinstance(order, Begin):
            self.fleet.begin(order.ranks)
        self.fleet.on_order(self, order)

    def close(self) -> None:
        self.is_closed = True

    def report(self, *messages: RankMessage) -> None:
        """Print messages, unless the process is closed."""
        if not self.is_closed:
            for message in messages:
                self._on_message(message)

    def report_ready(self) -> None:
        self.report(events.Ready(self.rank, self.node, 100))

    def step(self, number: int = 1) -> None:
        self.report(events.Progress(self.rank, self.node, 1, number, 1, 8, 0.1, 0.1, 0.2))

    def wait_for(self, *nodes: str) -> None:
        self.report(events.WaitingFor(self.rank, self.node, nodes))

    def accuse(self, culprit: int) -> None:
        self.report(events.Misbehaved(self.rank, self.node, culprit, "sent 20 bytes, expected 100"))

    def end_epoch(self) -> None:
        self.report(events.EpochEnd(self.rank, self.node, 1, 10, 80, 1.0, 0.1, 1.1, "hash"))

    def finish(self) -> None:
        self.report(events.Finished(self.rank, self.node, 1, 10, "hash", 1 << 20))

    def fail(self, message: str, *, remedy: str = "", exit_code: int = 1) -> None:
        """Fail as a rank does: report the failure, then exit."""
        self.report(events.Failed(self.rank, self.node, message, remedy, exit_code))
        self.exit(f"rank {self.rank} exited with code {exit_code}")

    def exit(self, reason: str = "", *, is_clean: bool = False, why: type[CsdctlError] = NodeError) -> None:
        self.has_exited = True
        error = why(reason or f"rank {self.rank} was killed by signal 15", node=self.node)
        self.report(ProcessEnded(self.rank, self.node, error, is_clean))
        if not is_clean:
            self.fleet.leave(self.rank, "its link was lost")


@dataclass
class ScriptedLink:
    """One link, in place of a `Link`."""

    rank: int
    is_connected: bool = True
    has_ended: bool = False
    is_dropped: bool = False
    """Whether the hub goes on without it."""
    started: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    is_clean: bool = False

    def end(self) -> None:
        self.has_ended = True

    def wait(self) -> JobOutcome:
        return JobOutcome(self.lines, self.is_connected, self.is_clean)


Script = Callable[["Fleet"], None]


class Fleet:
    """A host and its nodes; `scripts` holds what happens at each change of those who take part, from 1."""

    def __init__(self, directory: Path, num_nodes: int = 2) -> None:
        self.directory = directory
        self.nodes = ["host", *(f"csd{number}" for number in range(num_nodes))]
        self.processes: list[ScriptedRank] = []
        self.links: list[ScriptedLink] = []
        self.on_start: Callable[[ScriptedRank], None] = ScriptedRank.report_ready
        """What a rank's process does when it is started."""
        self.scripts: dict[int, Script] = {}
        self.on_order: Callable[[ScriptedRank, Order], None] = lambda rank, order: None
        self.on_event: Callable[[events.Event], None] = lambda event: None
        self.on_link: Callable[[ScriptedLink], None] = lambda link: None
        self.never_connect: set[int] = set()
        """Ranks whose links do not connect from now on."""
        self.overtaking: tuple[int, ...] = ()
        """Ranks whose completion arrives before the first event of rank 0."""
        self.reachable: set[int] = set()
        """Ranks with a machine that answers when they are restarted."""
        self.members: set[int] = set()
        self._begins_with: set[int] = set()
        self._lost: list[tuple[int, str]] = []
        self.groups: list[tuple[int, ...]] = []
        """Those who take part, after each change."""
        self.min_nodes = 0
        self.is_resumable = True
        self.is_check = False
        self.absent: tuple[int, ...] = ()
        self.late: dict[int, CsdctlError] = {}
        self.servers: tuple[int, ...] = ()
        """The rank of the server of each rank; by default rank 0."""
        self.should_stop: Callable[[], bool] = lambda: False
        self.next_order: Callable[[], Order | None] = lambda: None
        self.patience = SHORT_PATIENCE
        self.events: list[events.Event] = []

    def set_patience(self, **limits: float) -> None:
        self.patience = replace(self.patience, **limits)

    def rank(self, rank: int) -> ScriptedRank:
        """Return the newest process of a rank."""
        return next(process for process in reversed(self.processes) if process.rank == rank)

    def link(self, rank: int) -> ScriptedLink:
        """Return the newest link of a rank."""
        return next(link for link in reversed(self.links) if link.rank == rank)

    def nodes_of(self, event_type: type[events.Event]) -> list[str]:
        """Return the nodes of all events of this type, in order."""
        return [event.node for event in self.events if isinstance(event, event_type)]

    def lost_messages(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, events.NodeLost)]

    # What the hub beside rank 0 does

    def begin(self, ranks: tuple[int, ...]) -> None:
        """Rank 0 begins as soon as `ranks` have links."""
        self._begins_with, self.members, self._lost = set(ranks), set(), []
        self._change()
        if self.members:
            self._change()  # those whose links were there before

    def break_link(self, rank: int, *lines: str) -> None:
        """End the link of a rank, with what mpirun has said; its process stays."""
        self.link(rank).lines = list(lines)
        self.link(rank).has_ended = True
        self.leave(rank, "its link was lost")

    def leave(self, rank: int, reason: str) -> None:
        """Go on without a rank, and those behind it."""
        if rank == 0:
            self._begins_with = self.members = set()
        elif rank in self.members:
            gone = {rank, *(other for other, server in enumerate(self.servers) if server == rank)}
            for other in gone & self.members:
                self.link(other).is_dropped = True
            self._lost += [(other, reason) for other in sorted(gone & self.members)]
            self.members -= gone
            self._change()

    def _change(self) -> None:
        usable = (
            link for link in self.links if link.is_connected and not (link.has_ended or link.is_dropped)
        )
        linked = {0, *(link.rank for link in usable)}
        if not self.members and not self._begins_with <= linked:
            return
        present = linked & {process.rank for process in self.processes if not process.has_exited}
        joined = self.members | (present if self.members else self._begins_with)
        if joined != self.members or self._lost:
            is_start, self.members = not self.members, joined
            for rank in self.overtaking if is_start else ():
                self.rank(rank).finish()
            self.groups.append(tuple(sorted(self.members)))
            sizes = {str(rank): 8 for rank in sorted(self.members)}
            lost, self._lost = tuple(self._lost), []
            self.rank(0).report(events.Joined(0, "host", 1, 0, 10, 0, sizes, is_start, lost))

    def finish(self) -> None:
        """Let all who take part finish and exit."""
        for rank in sorted(self.members, reverse=True):
            self.rank(rank).finish()
            self.rank(rank).exit(is_clean=True)

    # What the supervisor does

    def supervise(self) -> Supervisor:
        ranks = [
            SimpleNamespace(node=node, server=self.servers[rank] if self.servers else 0)
            for rank, node in enumerate(self.nodes)
        ]
        away = {*self.absent, *self.late}
        sessions = {node: None for rank, node in enumerate(self.nodes) if rank not in away}
        run, task = SimpleNamespace(logs=self.directory), SimpleNamespace(name=CHECK if self.is_check else "")
        starter: Any = SimpleNamespace(
            spec=SimpleNamespace(run_id="20261122-100000", ranks=ranks, task=task),
            mpirun=SimpleNamespace(run=run, hub_key="", sessions=sessions, fleet=None),
            start=self._start,
            restart=self._restart,
            start_link=self._start_link,
        )
        conditions = Conditions(
            is_resumable=self.is_resumable,
            min_nodes=self.min_nodes,
            patience=self.patience,
            should_stop=lambda: self.should_stop(),  # noqa: PLW0108, a test may set it later
            next_order=lambda: self.next_order(),  # noqa: PLW0108
        )
        return Supervisor(starter, conditions, self._record, self.late)

    def run(self) -> None:
        self.supervise().run()

    def run_to_error(self, error_type: type[CsdctlError] = RunError) -> CsdctlError:
        """Return the error that ends the run, which must have exactly this type."""
        with pytest.raises(CsdctlError) as caught:
            self.run()
        assert type(caught.value) is error_type
        return caught.value

    def _record(self, event: events.Event) -> None:
        self.events.append(event)
        if isinstance(event, events.Joined):
            number = sum(isinstance(other, events.Joined) for other in self.events)
            self.scripts.get(number, lambda fleet: None)(self)
        self.on_event(event)

    def _start(self, rank: int) -> ScriptedRank:
        process = ScriptedRank(self, rank)
        self.processes.append(process)
        return process

    def _restart(self, rank: int) -> ScriptedRank:
        if rank not in self.reachable:
            raise UnreachableError("does not answer", node=self.nodes[rank])
        return self._start(rank)

    def _start_link(self, rank: int) -> Any:
        has_hub = not self.rank(0).has_exited
        is_connected = rank not in self.never_connect and has_hub
        self.links.append(ScriptedLink(rank, is_connected, has_ended=not has_hub))
        self.on_link(self.links[-1])
        if self._begins_with:
            self._change()
        return self.links[-1]

    def assert_nothing_left(self) -> None:
        """Check that no process of a rank is open, and no link has been left."""
        left = [process.rank for process in self.processes if not (process.is_closed or process.has_exited)]
        assert not left, f"not closed: ranks {left}"
        assert all(link.has_ended for link in self.links)


def orders_of(rank: ScriptedRank, order_type: type[Order]) -> list[Any]:
    return [order for order in rank.orders if isinstance(order, order_type)]


def is_told_to_stop(fleet: Fleet) -> bool:
    return bool(orders_of(fleet.rank(0), Stop))


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)
