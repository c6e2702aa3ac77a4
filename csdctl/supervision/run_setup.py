"""How to start the ranks of a run over SSH and their links with mpirun, and the limits of supervision."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.errors import DeadlineError, NodeError, UnreachableError
from csdctl.fleet.model import HOST_NAME
from csdctl.launch.leftovers import END_DEADLINE_S, CleanupOptions, clean_machine, relock_machine
from csdctl.launch.mpi_job import TRAFFIC_CLASSES, JobOutcome, MpiJob
from csdctl.launch.mpirun import Mpirun
from csdctl.runs.directory import CappedLog
from csdctl.supervision.rank_processes import EventValidator, RankProcess
from csdctl.transport.commands import MERGE_STREAMS
from csdctl.transport.many import Connections
from csdctl.transport.meter import LinkBytes, TrafficClass
from csdctl.transport.session import Session
from csdctl.worker.protocol.orders import Order
from csdctl.worker.protocol.run_spec import RunSpec


@dataclass(frozen=True)
class Patience:
    """Deadlines and numbers of retries of supervision."""

    start_s: float = 300.0
    link_s: float = 60.0
    silence_s: float = 300.0
    stall_s: float = 20.0
    """A rank that others wait for and that does not answer a ping for this long is lost."""
    ping_interval_s: float = 5.0
    """Rank 0 is pinged after this long without a message."""
    waiting_ping_s: float = 60.0
    """Ranks that take no part are pinged at this interval; without any order they exit after 600 s."""
    poll_s: float = 0.2
    """Links, limits and the start's deadline are checked at this interval without a message."""
    exit_s: float = 30.0
    """For all ranks to exit after the last completion record."""
    restart_interval_s: float = 10.0
    cause_s: float = 1.0
    """Maximum time to find the cause of a loss, after rank 0 has continued without the rank."""
    relink_s: float = 1.0
    """Pause before a link is started again, for each loss of it before."""
    max_restarts: int = 3
    """Restarts of a rank's process at once, without progress in between. Rank 0 is then lost for good. Others
    are restarted after pauses that begin with restart_interval_s and double."""
    renew_s: float = 30.0
    """After a rank has taken part for this long, its restarts are counted from 0."""


class Link:
    """The mpirun of one link, from its start to its end. Of several paths, the first that connects."""

    def __init__(self, jobs: Sequence[MpiJob], on_connected: Callable[[int], object]) -> None:
        """Start the first of `jobs`, each of which uses another path. `on_connected` gets its number."""
        self._jobs, self._on_connected = jobs, on_connected
        self._number = 0
        self._is_ended = False
        self.started = time.monotonic()
        self._outcome: JobOutcome | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        for number, job in enumerate(self._jobs):
            if self._is_ended:
                return
            self._number = number
            outcome = job.run()
            if outcome.is_connected:
                self._on_connected(number)
                self._outcome = outcome
                return
            self._outcome = self._outcome or outcome  # the cause is that of the path that was expected

    @property
    def has_ended(self) -> bool:
        """Whether mpirun has ended."""
        return not self._thread.is_alive()

    @property
    def is_connected(self) -> bool:
        """Whether both ends are connected."""
        return self._jobs[self._number].is_connected

    def end(self) -> None:
        """Let it end, and with it both ends of the link."""
        self._is_ended = True
        for job in self._jobs:
            job.end()

    def wait(self) -> JobOutcome:
        """Return how it ended."""
        self._thread.join(timeout=10)
        return self._outcome or JobOutcome()


PrepareNode = Callable[[Session], str]
"""Deliver to a machine what its rank needs; return the path of the spec there. Raises CsdctlError."""


@dataclass(frozen=True)
class Conditions:
    """When the ranks of a run start, end and are given up."""

    min_nodes: int = 0
    is_resumable: bool = False
    """Whether the run keeps its state for `train --resume`."""
    patience: Patience = field(default_factory=Patience)
    should_stop: Callable[[], bool] = lambda: False
    """Whether to end the run in order, as the first Ctrl-C does."""
    next_order: Callable[[], Order | None] = lambda: None
    """The next order for rank 0; None: nothing new. May raise KeyboardInterrupt, as Ctrl-C does."""
    model_bytes: int = 0
    prepare_late_node: PrepareNode | None = None
    """Called once for a machine that could not be reached when the run began. Its rank joins once it can."""
    traffic_classes: Mapping[str, TrafficClass] = field(default_factory=lambda: TRAFFIC_CLASSES)


@dataclass(frozen=True)
class RankStarter:
    """Starts the ranks of a spec and their links. Later connections are closed with `stack`."""

    spec: RunSpec
    spec_path: str
    """The spec in every machine's store, as is the worker."""
    mpirun: Mpirun
    directory: Path
    stack: ExitStack
    on_traffic: Callable[[LinkBytes], None]
    prepare_late_node: PrepareNode | None = None
    spec_paths: dict[str, str] = field(default_factory=dict)
    """The spec on those machines."""
    opened: dict[str, ExitStack] = field(default_factory=dict)
    """Resources of each node that was reconnected; closed when that connection is lost, too."""
    paths: dict[int, int] = field(default_factory=dict)
    """By rank, which of the paths of its link has connected."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the run is over: nothing is opened any more."""
    obstacles: dict[int, str] = field(default_factory=dict)
    """By rank, why it could not be restarted, as its log says."""

    def start(self, rank: int) -> RankProcess:
        """Start a rank. Raises CsdctlError."""
        return self._start_process(rank, self.mpirun.sessions[self.spec.ranks[rank].node])

    def restart(self, rank: int) -> RankProcess:
        """Start a lost rank, after ending its old processes. Over a new connection if there is none left."""
        try:
            return self._restart(rank)
        except Exception as error:  # every few seconds, for as long as the node is down
            if self.obstacles.get(rank) != str(error):
                self.obstacles[rank] = str(error)
                log = CappedLog(self.mpirun.run.rank_log(rank), self.spec.ranks[rank].node)
                log.write(f"cannot be restarted: {error}".encode())
                log.close()
            raise

    def _restart(self, rank: int) -> RankProcess:
        node, fleet = self.spec.ranks[rank].node, self.mpirun.fleet
        python, left_there = fleet.python_of(node), CleanupOptions(run_id=self.spec.run_id, node=node)
        if before := self.mpirun.sessions.get(node):
            try:
                clean_machine(before, python, left_there, deadline_s=END_DEADLINE_S)
                return self._start_process(rank, before)
            except (DeadlineError, UnreachableError):
                if node == HOST_NAME:
                    raise
            before.close()
        if node not in self.opened:
            self.opened[node] = self.stack.enter_context(ExitStack())
        self.opened[node].close()
        with ExitStack() as opened:  # closed again when this attempt fails
            connections = opened.enter_context(closing(Connections(fleet, self.directory, self.on_traffic)))
            session = connections.connect(fleet.node(node))
            opened.enter_context(relock_machine(session, python, doing="train", directory=self.directory))
            clean_machine(session, python, left_there, deadline_s=END_DEADLINE_S)
            if not before and self.prepare_late_node:
                self.spec_paths[node] = self.prepare_late_node(session)
            self.paths.pop(rank, None)
            if self.over.is_set():
                raise NodeError("the run is over", node=node)
            process = self._start_process(rank, session)
            self.mpirun.sessions[node] = session
            self.opened[node].enter_context(opened.pop_all())
            return process

    def start_link(self, rank: int) -> Link:
        """Start the link of a rank with the rank of its server, or of a server with rank 0."""
        node, server, mpirun = self.spec.ranks[rank].node, self.spec.ranks[rank].server, self.mpirun
        starter = self.spec.ranks[0 if server == rank else server].node
        paths = mpirun.find_paths(node, starter)
        if rank in self.paths:
            paths = paths[self.paths[rank] :][:1]
        jobs = [mpirun.build_link(rank, node, starter, path) for path in paths]
        return Link(jobs, lambda number: self.paths.setdefault(rank, number))

    def _start_process(self, rank: int, session: Session) -> RankProcess:
        path = self.spec_paths.get(session.name, self.spec_path)
        arguments = ["rank", "--spec", path, "--rank", str(rank)]
        command = self.mpirun.build_worker_command(session.name, arguments)
        conversation = session.converse([*MERGE_STREAMS, *command])
        nodes = [rank_spec.node for rank_spec in self.spec.ranks]
        has_hub = rank in {0, *(rank_spec.server for rank_spec in self.spec.ranks)}
        validator = EventValidator(rank, nodes, num_epochs=self.spec.recipe.epochs, has_hub=has_hub)
        log = CappedLog(self.mpirun.run.rank_log(rank), nodes[rank])
        return RankProcess(rank, session, conversation, validator, log)
