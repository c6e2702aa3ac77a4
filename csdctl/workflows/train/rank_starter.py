"""Starting the ranks of one run over SSH, and the links between them with mpirun."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from csdctl.fleet.model import HOST_NAME
from csdctl.launch.leftovers import end_rank
from csdctl.launch.machine_lock import relock_machine
from csdctl.launch.mpi_command import RankCommand, rank_marker
from csdctl.launch.mpirun import Mpirun
from csdctl.launch.rank_process import AttachRank, RankMessage, RankProcess
from csdctl.shipping.store import StoredFile
from csdctl.shipping.worker_calls import build_worker_command
from csdctl.transport.many import open_session
from csdctl.transport.session import Session
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.workspace.workspace import Workspace

OnMessage = Callable[[RankMessage], None]


class RankStarter:
    """Starts ranks and builds the commands of their links."""

    def __init__(
        self,
        spec: RunSpec,
        stored_spec: StoredFile,
        worker: StoredFile,
        space: Workspace,
        mpirun: Mpirun,
        stack: ExitStack,
        attached: Mapping[str, AttachRank],
    ) -> None:
        """Start no process on machines in `attached`: the one that is running there takes part.

        Connections that are opened later are closed with `stack`.
        """
        self._spec = spec
        self._stored_spec = stored_spec
        self._worker = worker
        self._space = space
        self._mpirun = mpirun
        self._stack = stack
        self._attached = attached

    def start(self, rank: int, on_message: OnMessage) -> RankProcess:
        """Start a rank, or attach the process that is already running on its machine; raises CsdctlError."""
        node = self._spec.ranks[rank].node
        session = self._space.sessions[node]
        if node not in self._attached:
            return self._start_process(rank, session, on_message)
        conversation = self._attached[node](self._stored_spec.path, rank)
        log_path = self._mpirun.log_path(rank)
        return RankProcess(rank, session, conversation, log_path, on_message, is_enlisted=True)

    def restart(self, rank: int, on_message: OnMessage) -> RankProcess:
        """Start a rank on a machine that was lost: over a new connection, after ending what is left there."""
        node = self._spec.ranks[rank].node
        fleet, directory = self._space.fleet, self._space.project.root
        python = fleet.python_of(node)
        with ExitStack() as opened:  # closed again when this attempt fails
            session = self._space.sessions[node]
            if node != HOST_NAME:
                session = opened.enter_context(
                    open_session(fleet, node, directory=directory, on_traffic=self._space.ledger.add)
                )
            opened.enter_context(relock_machine(session, python, doing="train", directory=directory))
            end_rank(self._spec.run_id, session, python)
            process = self._start_process(rank, session, on_message)
            self._stack.enter_context(opened.pop_all())
            return process

    def build_links(self, group: Sequence[int], generation: int) -> list[str]:
        """Return mpirun's argument list for the links of the ranks in `group`; raises CsdctlError."""
        arguments = ["link", "--run", self._spec.run_id, "--generation", str(generation)]
        return self._mpirun.build_command(
            [
                RankCommand(self._spec.ranks[rank].node, tuple(self._build_worker_command(rank, arguments)))
                for rank in group
            ]
        )

    def _start_process(self, rank: int, session: Session, on_message: OnMessage) -> RankProcess:
        command = self._build_worker_command(rank, ["rank", "--spec", self._stored_spec.path])
        # Both streams as one, in the order in which they were written.
        conversation = session.converse(["sh", "-c", 'exec "$@" 2>&1', "csdctl", *command])
        return RankProcess(rank, session, conversation, self._mpirun.log_path(rank), on_message)

    def _build_worker_command(self, rank: int, arguments: Sequence[str]) -> list[str]:
        node = self._spec.ranks[rank].node
        marker = ["--rank", str(rank), "--marker", rank_marker(self._spec.run_id, node)]
        python = self._space.fleet.python_of(node)
        return build_worker_command(python, self._worker.path, [*arguments, *marker])
