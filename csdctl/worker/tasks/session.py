"""A rank's part in a run: it joins one group after another, and survives the loss of each.

Owns the connection to the other ranks (listener, shared memory, communicator) and synchronizes the position
of the run: when a group forms, every rank whose state is another than that of rank 0 takes over that of
rank 0. Rank 0 is on the host; what a node says about its own state is not believed (docs/decisions/0024). The
task defines what the ranks then do.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module

import numpy as np

from csdctl.worker.compute.custom_step import AnyStep
from csdctl.worker.group.channel import Listener, SharedVectors
from csdctl.worker.group.communicator import Communicator, LinkCommunicator, TwoLevelCommunicator, by_server
from csdctl.worker.group.values import LinkLostError, PeerFaultError
from csdctl.worker.protocol.events import STATE, Joined, LinkLost, Misbehaved, Paused, Pong, Ready, WaitingFor
from csdctl.worker.protocol.json_codec import Sha256
from csdctl.worker.protocol.orders import BETWEEN_SERVERS, STAR, FormGroup
from csdctl.worker.protocol.recipe import BF16
from csdctl.worker.protocol.run_spec import (
    TRAIN,
    TRAIN_SPLIT,
    TRIAL,
    TRIAL_SPLIT,
    VERIFY,
    VERIFY_SPLIT,
    RunSpec,
)
from csdctl.worker.tasks.progress import Reporter, RunProgress, hash_state, max_state_bytes, pack, unpack
from csdctl.worker.tasks.task import Group, Orders, Task, TaskContext

TASKS = {
    TRAIN_SPLIT: "csdctl.worker.tasks.split:Split",
    TRIAL_SPLIT: "csdctl.worker.tasks.split:SplitTrial",
    TRAIN: "csdctl.worker.tasks.train:Train",
    TRIAL: "csdctl.worker.tasks.train:Trial",
    VERIFY: "csdctl.worker.tasks.verify:Verify",
    VERIFY_SPLIT: "csdctl.worker.tasks.verify:VerifySplit",
}
"""Name → module:class. A task's module is imported only when the task is requested."""


class RankSession:
    """Runs the task of `spec` on rank `rank`, in the groups that `orders` form."""

    def __init__(self, spec: RunSpec, rank: int, step: AnyStep | None = None) -> None:
        """`step`: of a probe session that takes part as a rank; it has the same model, recipe and noise."""
        self._spec = spec
        self._me = spec.ranks[rank]
        self._servers = [each.server for each in spec.ranks]
        self._reporter = Reporter(self._me)
        self._orders = Orders(lambda number: self._reporter.emit(Pong, number))
        self._progress = RunProgress(spec)
        module, _, name = TASKS[spec.task.name].partition(":")
        context = TaskContext(spec, self._me, self._progress, self._reporter, self._orders, step)
        self._task: Task = getattr(import_module(module), name)(context)

    def run(self) -> None:
        """Run the task to its end; raises WorkerError."""
        self._task.load()
        size, _ = max(self._task.sum_sizes)
        self._vectors = SharedVectors(size)
        self._sums: SharedVectors | None = None
        """The vectors of the link between servers."""
        spec = self._spec
        with contextlib.closing(Listener(spec.run_id, self._me.rank, spec.link_key)) as listener:
            num_samples = self._me.num_private + self._me.num_public
            self._reporter.emit(Ready, num_samples)
            while (reason := self._run_in_group(self._orders.next_group(), listener)) is None:
                pass
            # A link that comes late waits here, as saving a model may take long; refused, mpirun would fail.
            self._task.finish(reason)

    def await_release(self) -> None:
        """Wait until this rank receives no more orders, so that the process can do other work."""
        self._orders.await_release()
        self._orders.on_group = lambda: None  # frees the communicator, and through it the shared memory
        self._vectors.close()
        if self._sums:
            self._sums.close()

    def _run_in_group(self, order: FormGroup, listener: Listener) -> str | None:
        """Join the group and run the task in it; None when the group is lost or left, else why it ends."""
        communicator: Communicator | None = None
        try:
            communicator = self._join(order, listener)
            if communicator is None:
                return None
            self._orders.on_group = communicator.interrupt
            if self._orders.has_group:
                raise LinkLostError
            group = Group(order.generation, order.ranks, communicator)
            if self._task.is_resumable:
                self._synchronize(group)
            else:
                self._report_joined(group, (1, 0, 0, 0), dict.fromkeys(group.ranks, 0))
            reason = self._task.run(group)
            self._reporter.traffic(communicator, group.generation, group.ranks)
            communicator.close()
        except LinkLostError as error:
            if isinstance(error, PeerFaultError):
                culprit, me = order.ranks[error.rank], self._me.rank
                # csdctl believes rank 0, and of a node its server.
                if me == 0 or culprit != me == self._servers[culprit]:
                    self._reporter.emit(Misbehaved, culprit, error.message)
            if communicator:
                communicator.disconnect()
            position = self._progress.position
            self._reporter.emit(LinkLost, order.generation, position.epoch, position.step)
            return None
        if reason is None:
            self._reporter.emit(Paused, order.generation)
        return reason

    def _join(self, order: FormGroup, listener: Listener) -> Communicator | None:
        """Connect to the group's other ranks; None when another group is ordered first."""
        if len(order.ranks) == 1:
            return Communicator(self._vectors.local)
        me, servers = order.ranks.index(self._me.rank), by_server(order.ranks, self._servers)
        own = next(members for members in servers if me in members)
        leaders = [members[0] for members in servers]
        links: dict[bool, LinkCommunicator] = {}
        """By whether they connect the servers."""
        num_links = (len(own) > 1) + (me in leaders and len(leaders) > 1)
        while len(links) < num_links:
            found = listener.accept_link(order.generation, lambda: self._orders.has_group)
            if found is None:
                return None
            channel, greeting = found
            is_between = greeting.level == BETWEEN_SERVERS
            members = leaders if is_between else own
            if is_between in links or (greeting.size, greeting.rank) != (len(members), members.index(me)):
                raise LinkLostError
            if is_between and self._sums is None:
                self._sums = SharedVectors(len(self._vectors.local))
            vectors = self._sums if is_between and self._sums else self._vectors
            waited = [self._spec.ranks[order.ranks[place]].node for place in members]
            on_waiting = partial(self._report_waiting, waited, greeting.rank)
            links[is_between] = LinkCommunicator(channel, greeting, vectors, on_waiting)
        communicator: LinkCommunicator | TwoLevelCommunicator = links[max(links)]
        if len(servers) > 1:
            ends = links.get(False), links.get(True)
            communicator = TwoLevelCommunicator(me, servers, self._vectors.local, *ends)
        is_halved = self._spec.recipe.compression == BF16  # MPI does not add bfloat16
        communicator.choose_collective(STAR if is_halved else order.collective, self._task.sum_sizes)
        return communicator

    def _report_waiting(self, nodes: Sequence[str], rank: int, missing: list[int]) -> None:
        """Report whom rank `rank` of a link to `nodes` waits for.

        Only rank 0 of a star knows which ranks are missing. When rank 0 is, rank 1 reports it.
        """
        if missing or rank <= 1:
            self._reporter.emit(WaitingFor, tuple(nodes[place] for place in missing))

    def _synchronize(self, group: Group) -> None:
        """Take over the state of rank 0, and divide the rest of the epoch.

        A rank with the same state shows it by a hash, and gets nothing sent. One that is ahead goes back:
        rank 0 has been restarted, from its step file, and at most one step is done again.
        """
        communicator, progress = group.communicator, self._progress
        variables = list(self._task.variables)
        hashes = communicator.allgather(hash_state(variables, progress.position), Sha256)
        others = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
        packed = pack(variables, progress.position) if communicator.rank == 0 and others else None
        for rank in others:
            if packed is not None:
                communicator.send(rank, packed, STATE)
            elif rank != communicator.rank:
                communicator.relay(0, rank, max_state_bytes(variables), STATE)
            else:
                received = communicator.receive(0, max_state_bytes(variables), STATE)
                progress.position = unpack(np.frombuffer(received, np.uint8), variables, progress.own)
        progress.regroup(group.ranks)
        position, segment = progress.position, progress.segment
        self._report_joined(
            group,
            (position.epoch, position.step, segment.stop_step, position.total_steps),
            {share.rank: share.batch_size for share in segment.shares},
            progress.num_lost(),
            position.totals.samples,
        )

    def _report_joined(
        self, group: Group, steps: tuple[int, int, int, int], sizes: Mapping[int, int], *samples: int
    ) -> None:
        """Report that the ranks are connected, where in the run they are, and their batch sizes."""
        communicator = group.communicator
        by_rank = {str(rank): size for rank, size in sizes.items()}
        sum_s = round(communicator.sum_s, 6)
        self._reporter.emit(
            Joined, group.generation, *steps, by_rank, communicator.collective, sum_s, *samples
        )
