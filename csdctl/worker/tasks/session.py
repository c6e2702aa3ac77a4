"""A rank's part in a run: it joins the others, and survives the loss of its link.

Owns the connection to the other ranks (hub, listener, communicator) and the position of the run. A rank that
joins takes over the state of rank 0, unless it has the same state. Rank 0 is on the host. A node's statements
about its own state are not believed (docs/decisions/0024). The task defines what the ranks do together.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

import numpy as np

from csdctl.worker.group.communicator import Communicator, HubCommunicator, HubProcess
from csdctl.worker.group.hub import HubSettings
from csdctl.worker.group.values import LinkLostError
from csdctl.worker.process.output import print_line
from csdctl.worker.protocol import run_spec
from csdctl.worker.protocol.events import Pong, Ready, WaitingFor
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.protocol.sandbox import link_address
from csdctl.worker.sandbox.program import check_sandbox
from csdctl.worker.tasks.progress import Reporter, RunProgress, hash_state, max_state_bytes, unpack
from csdctl.worker.tasks.task import Orders, Task, TaskContext

TASKS = {
    run_spec.CHECK: "csdctl.worker.tasks.check:SumCheck",
    run_spec.TRAIN_SPLIT: "csdctl.worker.tasks.split:Split",
    run_spec.TRIAL_SPLIT: "csdctl.worker.tasks.trial:SplitTrial",
    run_spec.TRAIN: "csdctl.worker.tasks.train:Train",
    run_spec.TRIAL: "csdctl.worker.tasks.trial:Trial",
    run_spec.VERIFY: "csdctl.worker.tasks.verify:Verify",
    run_spec.VERIFY_SPLIT: "csdctl.worker.tasks.verify:VerifySplit",
}
"""Name → module:class. A task's module is imported only when the task is requested."""


class RankSession:
    """Runs the task of `spec` on rank `rank`."""

    def __init__(
        self,
        spec: RunSpec,
        rank: int,
        hub_command: Sequence[str],
        write_line: Callable[[str], None] = print_line,
    ) -> None:
        """`hub_command`: see `HubProcess`. `write_line` writes the lines of events."""
        self._sandbox = check_sandbox()
        self._spec, self._me = spec, spec.ranks[rank]
        self._servers = tuple(rank_spec.server for rank_spec in spec.ranks)
        has_hub = len(spec.ranks) > 1 if rank == 0 else rank in self._servers
        self._hub = HubProcess(hub_command) if has_hub else None
        self._reporter = Reporter(self._me, write_line)
        self._orders = Orders(lambda number: self._reporter.emit(Pong, number))
        self._progress = RunProgress(spec)
        module, _, name = TASKS[spec.task.name].partition(":")
        context = TaskContext(spec, self._me, self._progress, self._reporter, self._orders)
        self._task: Task = getattr(import_module(module), name)(context)

    def run(self) -> None:
        """Run the task to its end. Raises WorkerError."""
        self._task.load()
        try:
            self._communicator = self._connect()
        except LinkLostError:  # the hub ended while the task was loading
            self._end_without_hub()
        self._reporter.emit(Ready, self._me.num_private + self._me.num_public, self._sandbox)
        reason: str | None = None
        if self._me.rank == 0:
            try:
                self._begin(self._orders.wait(self._orders.begins).ranks)
                reason = self._take_part()
            except LinkLostError:
                self._end_without_hub()
        else:
            while reason is None:
                with contextlib.suppress(LinkLostError):
                    self._join()
                    reason = self._take_part()
        self._task.finish(reason)

    def _connect(self) -> Communicator:
        spec, sizes = self._spec, tuple(self._task.sum_sizes)
        max_bytes = max(self._task.max_message_bytes, max_state_bytes(self._task.values))
        if self._hub is None:
            address = link_address(spec.run_id, self._me.rank, spec.link_key) if self._me.rank else ""
            return Communicator(self._me.rank, sizes, max_bytes, self._report_waiting, address)
        settings = HubSettings(
            run_id=spec.run_id,
            rank=self._me.rank,
            key=self._orders.wait(self._orders.hubs).key,
            node_key=spec.link_key,
            servers=self._servers,
            sizes=sizes,
            max_bytes=max_bytes,
        )
        return HubCommunicator(self._hub, settings, self._report_waiting)

    def _end_without_hub(self) -> NoReturn:
        print("the hub of this rank has ended", flush=True)
        os._exit(1)

    def _report_waiting(self, ranks: list[int]) -> None:
        self._reporter.emit(WaitingFor, tuple(self._spec.ranks[rank].node for rank in ranks))

    def _take_part(self) -> str:
        reason = self._task.run(self._communicator)
        self._reporter.traffic(self._communicator)
        self._communicator.close()
        return reason

    def _begin(self, ranks: Sequence[int]) -> None:
        """Wait, on rank 0, until `ranks` have joined, and give them the state."""
        communicator, nodes = self._communicator, set(ranks) - {0}
        # A host that does not train begins with the first node.
        while not nodes <= set(communicator.joining) or not (self._me.batch_size or communicator.joining):
            communicator.await_joining()
        hashes = dict(communicator.joining)
        communicator.admit(nodes or ({*hashes} if not self._me.batch_size else ()))
        communicator.gather(None, type(None))
        self._task.settle(communicator, (), hashes)

    def _join(self) -> None:
        """Connect to rank 0 from another rank, and take over its state. Raises LinkLostError."""
        communicator, values = self._communicator, self._task.values
        communicator.connect(self._orders.check_orphaned)
        communicator.join(hash_state(values, self._progress.position))
        if packed := communicator.take_state():
            state = np.frombuffer(packed, np.uint8)
            self._progress.position, self._task.values = unpack(state, values, self._progress.samples)
        self._progress.regroup(communicator.members)
