"""How to start the ranks of a run over SSH and their links with mpirun, and the limits of supervision."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.errors import DeadlineError, UnreachableError
from csdctl.fleet.model import HOST_NAME
from csdctl.launch.leftovers import END_DEADLINE_S, CleanupOptions, clean_machine, relock_machine
from csdctl.launch.mpi_job import JobOutcome, MpiJob
from csdctl.launch.mpirun import Mpirun
from csdctl.runs.directory import CappedLog
from csdctl.supervision.rank_processes import AttachRank, EventValidator, RankProcess, StartRank
from csdctl.transport.many import open_session
from csdctl.transport.meter import LinkBytes
from csdctl.transport.session import Conversation, Session
from csdctl.worker.protocol.run_spec import RunSpec


@dataclass(frozen=True)
class Patience:
    """Deadlines and numbers of retries of supervision."""

    start_s: float = 300.0
    """Maximum time until all ranks are ready, and until rank 0 is ready again after a loss."""
    silence_s: float = 300.0
    """Without progress on any rank."""
    answer_s: float = 8.0
    """A live rank answers a ping within this time, however busy its machine is."""
    min_answer_s: float = 3.0
    """The last rank to answer gets at least this long, even when all others answered at once."""
    join_s: float = 60.0
    """For mpirun to connect the ranks of a group, plus `join_per_rank_s` for each rank."""
    join_per_rank_s: float = 0.5
    stall_s: float = 20.0
    """A rank that others wait for and that does not answer a ping for this long is lost."""
    ping_interval_s: float = 5.0
    """A rank that keeps finished or paused ranks waiting is pinged after this long without a message."""
    waiting_ping_s: float = 60.0
    """Ranks that wait for a group are pinged at this interval; without any order they exit after 600 s."""
    settle_s: float = 0.5
    """Losses and failures with the same cause are reported within this time."""
    poll_s: float = 0.2
    """mpirun, the limits and the start's deadline are checked at this interval without a message."""
    exit_s: float = 30.0
    """For all ranks to exit after the last completion record."""
    mpirun_exit_s: float = 15.0
    """For the ranks to report why mpirun exited, when it exited with 0."""
    restart_interval_s: float = 10.0
    """Pause between two attempts to restart a lost rank."""
    max_restarts: int = 3
    """Restarts of one rank without progress in between."""
    max_attempts: int = 3
    """Groups in a row that fail without progress before the run fails."""


class Links:
    """The mpirun of each level of a group, from their start to the end of all."""

    def __init__(self, *jobs: MpiJob) -> None:
        """Start `jobs`."""
        self._jobs = jobs
        self._outcomes: list[JobOutcome] = []
        """Of those that have exited, in this order."""
        self._exited: float | None = None
        self.started = time.monotonic()
        self._threads = [threading.Thread(target=self._watch, args=(job,), daemon=True) for job in jobs]
        for thread in self._threads:
            thread.start()

    def _watch(self, job: MpiJob) -> None:
        # Without a deadline: the ranks report over SSH, not the links.
        self._outcomes.append(job.run())

    def has_failed(self, grace_s: float) -> bool:
        """Return whether an mpirun has exited although the ranks still need it.

        mpirun exits with 0 when the ranks have finished, and also when a node is lost. The ranks report
        which of the two: for `grace_s` after an exit with 0, this returns False.
        """
        if all(thread.is_alive() for thread in self._threads):
            return False
        self._exited = self._exited or time.monotonic()
        outcomes = list(self._outcomes)
        is_clean = bool(outcomes) and all(outcome.exit_code == 0 for outcome in outcomes)
        return time.monotonic() - self._exited > (grace_s if is_clean else 0.0)

    def end(self) -> list[JobOutcome]:
        """End every mpirun that still runs, and return how they ended, in this order."""
        for job in self._jobs:
            job.end()
        for thread in self._threads:
            thread.join(timeout=10)
        return list(self._outcomes)


@dataclass(frozen=True)
class RunSetup:
    """How to start the ranks and their links; the first two callables may raise CsdctlError."""

    run_id: str
    nodes: Sequence[str]
    """The machine of every rank, in order; rank 0 is on the host."""
    start_rank: StartRank
    restart_rank: StartRank
    """Start a rank that was lost, after killing its old processes."""
    start_links: Callable[[Sequence[int], int], Links]
    """Start the mpirun of each level for these ranks and this generation."""
    log_directory: Path
    min_nodes: int
    is_resumable: bool
    """Whether the run keeps its state for `train --resume`."""
    patience: Patience
    collective: str = ""
    """One of `protocol.orders.COLLECTIVE_NAMES`; '' lets the ranks measure which is fastest."""
    absent: tuple[int, ...] = ()
    """Ranks that take no part from the beginning."""
    servers: Sequence[int] = ()
    """The rank of the server of every rank, without which it cannot train; () for rank 0."""
    should_stop: Callable[[], bool] = lambda: False
    """Whether to end the run in order, as the first Ctrl-C does."""


@dataclass(frozen=True)
class RankStarter:
    """Starts ranks and links; connections that are opened later are closed with `stack`."""

    spec: RunSpec
    spec_path: str
    """The spec in every machine's store, as is the worker."""
    mpirun: Mpirun
    directory: Path
    stack: ExitStack
    attached: Mapping[str, AttachRank]
    """Machines on which no process is started: the process running there is attached."""
    on_traffic: Callable[[LinkBytes], None]
    opened: dict[str, ExitStack] = field(default_factory=dict)
    """What is open to nodes whose connection was lost; closed when that is lost, too."""
    told: dict[int, str] = field(default_factory=dict)
    """By rank, why it could not be restarted, as its log says."""

    def start(self, rank: int) -> RankProcess:
        """Start a rank, or attach the process that is already running on its machine; raises CsdctlError."""
        node = self.spec.ranks[rank].node
        session = self.mpirun.sessions[node]
        if node not in self.attached:
            return self._start_process(rank, session)
        conversation = self.attached[node](self.spec_path, rank)
        return self._watch(rank, session, conversation, is_attached=True)

    def restart(self, rank: int) -> RankProcess:
        """Start a lost rank, after ending its old processes; over a new connection if there is none left."""
        try:
            return self._restart(rank)
        except Exception as error:  # every few seconds, for as long as the node is down
            if self.told.get(rank) != str(error):
                self.told[rank] = str(error)
                log = CappedLog(self.mpirun.log_path(rank), self.spec.ranks[rank].node)
                log.write(f"cannot be restarted: {error}".encode())
                log.close()
            raise

    def _restart(self, rank: int) -> RankProcess:
        node, fleet = self.spec.ranks[rank].node, self.mpirun.fleet
        python, session = fleet.python_of(node), self.mpirun.sessions[node]
        left_there = CleanupOptions(run_id=self.spec.run_id, node=node)
        try:
            clean_machine(session, python, left_there, deadline_s=END_DEADLINE_S)
            return self._start_process(rank, session)
        except (DeadlineError, UnreachableError):
            if node == HOST_NAME:
                raise
        session.close()
        self.opened.pop(node, ExitStack()).close()
        with ExitStack() as opened:  # closed again when this attempt fails
            session = opened.enter_context(
                open_session(fleet, node, directory=self.directory, on_traffic=self.on_traffic)
            )
            opened.enter_context(relock_machine(session, python, doing="train", directory=self.directory))
            clean_machine(session, python, left_there, deadline_s=END_DEADLINE_S)
            process = self._start_process(rank, session)
            self.mpirun.sessions[node] = session
            self.opened[node] = self.stack.enter_context(opened.pop_all())
            return process

    def start_links(self, group: Sequence[int], generation: int) -> Links:
        """Start an mpirun for each level of the ranks in `group`, with their links; raises CsdctlError."""
        ranks = {self.spec.ranks[rank].node: rank for rank in group}
        jobs = []
        for level in self.mpirun.fleet.levels(ranks):
            arguments = ["link", "--run", self.spec.run_id, "--generation", str(generation)]
            arguments += ["--level", level.name]
            members = [ranks[level.machines[0]], *sorted(ranks[node] for node in level.machines[1:])]
            commands = [
                (rank, self.spec.ranks[rank].node, [*arguments, "--rank", str(rank)]) for rank in members
            ]
            jobs.append(self.mpirun.build_job(commands, level))
        return Links(*jobs)

    def _start_process(self, rank: int, session: Session) -> RankProcess:
        arguments = ["rank", "--spec", self.spec_path, "--rank", str(rank)]
        command = self.mpirun.build_worker_command(session.name, arguments)
        # Merge both streams, in the order in which they are written.
        conversation = session.converse(["sh", "-c", 'exec "$@" 2>&1', "csdctl", *command])
        return self._watch(rank, session, conversation, is_attached=False)

    def _watch(
        self, rank: int, session: Session, conversation: Conversation, *, is_attached: bool
    ) -> RankProcess:
        nodes = [other.node for other in self.spec.ranks]
        validator = EventValidator(rank, nodes, num_epochs=self.spec.recipe.epochs)
        log = CappedLog(self.mpirun.log_path(rank), nodes[rank])
        return RankProcess(rank, session, conversation, validator, log, is_attached=is_attached)
