"""Start the ranks of one run over SSH, and the links between them with mpirun."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.launch.leftovers import end_rank
from csdctl.launch.machine_lock import relock_machine
from csdctl.launch.mpi_command import RankCommand, rank_marker
from csdctl.launch.mpirun import Mpirun
from csdctl.runs.capped_log import CappedLog
from csdctl.shipping.worker_calls import build_worker_command
from csdctl.supervision.event_validator import EventValidator
from csdctl.supervision.rank_process import AttachRank, OnMessage, RankProcess
from csdctl.supervision.run_setup import Links
from csdctl.transport.many import open_session
from csdctl.transport.meter import LinkBytes
from csdctl.transport.session import Conversation, Session
from csdctl.worker.protocol.run_spec import JOINING, RunSpec


@dataclass(frozen=True)
class RankStarter:
    """Starts ranks and links; connections that are opened later are closed with `stack`."""

    spec: RunSpec
    spec_path: str
    """The spec in every machine's store, as is the worker."""
    worker_path: str
    fleet: Fleet
    sessions: dict[str, Session]
    """The newest of each machine; mpirun has the same."""
    mpirun: Mpirun
    directory: Path
    stack: ExitStack
    attached: Mapping[str, AttachRank]
    """Machines on which no process is started: the process running there is attached."""
    on_traffic: Callable[[LinkBytes], None]

    def start(self, rank: int, on_message: OnMessage) -> RankProcess:
        """Start a rank, or attach the process that is already running on its machine; raises CsdctlError."""
        node = self.spec.ranks[rank].node
        session = self.sessions[node]
        if node not in self.attached:
            return self._start_process(rank, session, on_message)
        conversation = self.attached[node](self.spec_path, rank)
        return self._watch(rank, session, conversation, on_message, is_attached=True)

    def restart(self, rank: int, on_message: OnMessage) -> RankProcess:
        """Start a rank on a machine that was lost: over a new connection, after ending its old processes."""
        node = self.spec.ranks[rank].node
        python = self.fleet.python_of(node)
        with ExitStack() as opened:  # closed again when this attempt fails
            session = self.sessions[node]
            if node != HOST_NAME:
                session = opened.enter_context(
                    open_session(self.fleet, node, directory=self.directory, on_traffic=self.on_traffic)
                )
            opened.enter_context(relock_machine(session, python, doing="train", directory=self.directory))
            end_rank(self.spec.run_id, session, python)
            process = self._start_process(rank, session, on_message)
            self.sessions[node] = session
            self.stack.enter_context(opened.pop_all())
            return process

    def start_links(self, group: Sequence[int], generation: int) -> Links:
        """Start mpirun with the links of the ranks in `group`; raises CsdctlError."""
        arguments = ["link", "--run", self.spec.run_id, "--generation", str(generation)]
        return Links(
            self.mpirun.build_job(
                [
                    RankCommand(
                        rank, self.spec.ranks[rank].node, tuple(self._build_worker_command(rank, arguments))
                    )
                    for rank in group
                ]
            )
        )

    def _start_process(self, rank: int, session: Session, on_message: OnMessage) -> RankProcess:
        command = self._build_worker_command(rank, ["rank", "--spec", self.spec_path])
        # Merge both streams, in the order in which they are written.
        conversation = session.converse(["sh", "-c", 'exec "$@" 2>&1', "csdctl", *command])
        return self._watch(rank, session, conversation, on_message, is_attached=False)

    def _watch(
        self,
        rank: int,
        session: Session,
        conversation: Conversation,
        on_message: OnMessage,
        *,
        is_attached: bool,
    ) -> RankProcess:
        nodes = [other.node for other in self.spec.ranks]
        validator = EventValidator(
            rank, nodes, num_epochs=self.spec.recipe.epochs, must_join=self.spec.task.name in JOINING
        )
        log = CappedLog(self.mpirun.log_path(rank), nodes[rank])
        return RankProcess(rank, session, conversation, validator, log, on_message, is_attached=is_attached)

    def _build_worker_command(self, rank: int, arguments: Sequence[str]) -> list[str]:
        node = self.spec.ranks[rank].node
        marker = ["--rank", str(rank), "--marker", rank_marker(self.spec.run_id, node)]
        python = self.fleet.python_of(node)
        return build_worker_command(python, self.worker_path, [*arguments, *marker])
