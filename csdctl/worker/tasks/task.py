"""The interface between a task and the session that runs it, and what tasks with a model have in common.

A new task is a class that implements `Task`, in a file of its own, and a line in `TASKS` (session.py).
"""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from csdctl.worker.compute.backend import STATE, load_backend, tf
from csdctl.worker.compute.custom_step import AnyStep, CustomStep, make_step
from csdctl.worker.compute.forward import BatchedPass, feature_pass
from csdctl.worker.compute.model import hash_weights, load
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.prepared import EpochReader, SyntheticReader
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.json_codec import ProtocolError, Sha256
from csdctl.worker.protocol.orders import FormGroup, PauseAtEpochEnd, Ping, Release, Stop, order_from_line
from csdctl.worker.protocol.recipe import BF16
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.progress import Reporter, RunProgress

ORPHAN_S = 600.0
"""A rank without a group that receives no order for this long exits."""


class Orders:
    """The orders received so far, for the session and its task to act on."""

    def __init__(self, on_ping: Callable[[int], None]) -> None:
        """`on_ping` is called by the thread with the number of each `Ping`."""
        self.is_stopping = False
        self.is_pausing = False
        self.on_group: Callable[[], None] = lambda: None
        """Called by the thread when a group is ordered: waiting in an earlier group is then pointless."""
        self._groups: queue.Queue[FormGroup] = queue.Queue()
        self._on_ping = on_ping
        self._heard = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next_group(self) -> FormGroup:
        """Return the latest group ordered; raises WorkerError when no order of any kind comes in time."""
        group, began = None, time.monotonic()  # a rank that trains may hear nothing for hours
        while group is None:
            left_s = max(began, self._heard) + ORPHAN_S - time.monotonic()
            if left_s <= 0:
                raise WorkerError(
                    f"received no order for {ORPHAN_S:g} s: csdctl has exited or is disconnected"
                )
            with contextlib.suppress(queue.Empty):
                group = self._groups.get(timeout=left_s)
        while not self._groups.empty():
            group = self._groups.get()
        self.is_pausing = False
        return group

    def await_release(self) -> None:
        """Wait for `Release`: from then on, other code may read the input."""
        self._reader.join()

    @property
    def has_group(self) -> bool:
        """Whether a group was ordered that `next_group` has not returned yet."""
        return not self._groups.empty()

    def _read(self) -> None:
        for line in sys.stdin:
            try:
                order = order_from_line(line)
            except ProtocolError:
                continue
            self._heard = time.monotonic()
            if isinstance(order, FormGroup):
                self._groups.put(order)
                self.on_group()
            elif isinstance(order, PauseAtEpochEnd):
                self.is_pausing = True
            elif isinstance(order, Stop):
                self.is_stopping = True
            elif isinstance(order, Release):
                return
            elif isinstance(order, Ping):
                self._on_ping(order.number)
        os._exit(1)


@dataclass(frozen=True)
class Group:
    """The ranks that work together until one of them is lost or joins."""

    generation: int
    ranks: tuple[int, ...]
    """The run's ranks, in order of MPI rank."""
    communicator: Communicator


FINISHED = ""
"""Value that `Task.run` returns after the last epoch."""


@dataclass(frozen=True)
class TaskContext:
    """Objects that a task gets from its session."""

    spec: RunSpec
    me: RankSpec
    progress: RunProgress
    reporter: Reporter
    orders: Orders
    step: AnyStep | None = None
    """The step of a probe session, when the rank is one: same model, recipe and noise."""


class Task(Protocol):
    """Work that the ranks of a run do together."""

    def __init__(self, context: TaskContext) -> None: ...

    is_resumable: bool
    """Whether a new group takes over the state of rank 0 and continues from there."""

    @property
    def sum_sizes(self) -> Sequence[tuple[int, int]]:
        """Of each vector that the ranks sum in a step, in their order; known after `load`.

        Its elements, and how many of them are sent as bfloat16.
        """

    @property
    def variables(self) -> Sequence[Any]:
        """The variables that a rank takes over from rank 0, in addition to the progress, when they differ."""

    def load(self) -> None:
        """Load what the task needs and reach full speed; raises WorkerError."""

    def run(self, group: Group) -> str | None:
        """Work with `group` until the task is finished, or pauses and continues in the next group.

        Returns None for a pause, else why the run ends before its last epoch, as in `Finished.reason`. Raises
        LinkLostError when the group is lost, and WorkerError when the task fails.
        """

    def finish(self, reason: str) -> None:
        """Report the completion record, after the group has ended."""


class ModelTask:
    """Loads data, model and step of one rank, and warms them up."""

    is_resumable = True

    def __init__(self, context: TaskContext) -> None:
        self.spec, self.me, self.progress = context.spec, context.me, context.progress
        self.reporter, self.orders, self.is_root = context.reporter, context.orders, context.me.rank == 0
        self._step_of_probes = context.step
        self._extractor: BatchedPass | None = None
        # Importing TensorFlow is not part of the set-up time that the rank reports.
        if context.step is None:
            load_backend(context.me.runtime)

    @property
    def sum_sizes(self) -> list[tuple[int, int]]:
        """As of `Task`."""
        layouts = self.step.layouts if isinstance(self.step, CustomStep) else [self.layout]
        is_halved = self.spec.recipe.compression == BF16
        return [
            (
                int(layout.step_size + 2 + len(self.spec.ranks)),
                int(layout.gradients.stop) // 2 * 2 if is_halved else 0,
            )
            for layout in layouts
        ]

    @property
    def variables(self) -> list[Any]:
        """Weights and optimizer state, but for the learning rate, which every step sets."""
        rates = {id(rate) for rate in self.step.learning_rates}
        return [variable for variable in self.step.state if id(variable) not in rates]

    def load(self) -> None:
        """Load data and model, trace the graphs and reach full speed; the weights stay as they were."""
        self.reader = self.open_reader()
        with tf.device(STATE):
            self.step = self._step_of_probes or self._load_step()
        self.step.micro_batch_size = self.me.micro_batch_size
        self.layout = self.summed.layout
        self.reporter.metrics = self.step.metrics
        self.restore()
        self._warm_up()

    @property
    def summed(self) -> Any:
        """What computes the vectors that the ranks sum, and applies their sum."""
        return self.step

    @property
    def whole_model(self) -> Any:
        """The model whose samples and labels the ranks have."""
        return self.step.model

    def restore(self) -> None:
        """Load the state of an earlier process of this run; tasks without a state have none."""

    def open_reader(self) -> EpochReader | SyntheticReader:
        """Return what the samples are read with."""
        return EpochReader(self.spec, self.me.rank, self.to_features if self.spec.head else None)

    def example(self, count: int) -> tuple[Array, Array]:
        """Return at most `count` samples and their labels, as the model takes them."""
        return self.reader.first(count)

    def to_features(self, samples: Array) -> Array:
        """Return the features of samples (n, …), as the model before the head computes them here."""
        if self._extractor is None:
            assert self.spec.head is not None
            self._extractor = feature_pass(self.spec.head.prefix)
        return self._extractor.run(samples)

    def share_hash(self, communicator: Communicator) -> tuple[str, list[int]]:
        """Return the hash of the weights, and the ranks of the group that have another than rank 0."""
        weights_hash = hash_weights(self.summed.model)
        hashes = communicator.allgather(weights_hash, Sha256)
        return weights_hash, [rank for rank, found in enumerate(hashes) if found != hashes[0]]

    def other_weights(self, when: str, ranks: Iterable[int]) -> WorkerError:
        """Return the error for ranks of the run that have other weights than rank 0."""
        nodes = ", ".join(self.spec.ranks[rank].node for rank in ranks)
        return WorkerError(
            f"after {when} the weights of {nodes} differ from rank 0's",
            remedy="check for failing memory or different TensorFlow versions: `csdctl discover`",
        )

    def load_model(self) -> Any:
        """Return the run's model, compiled."""
        spec = self.spec
        return load(Path(spec.architecture), Path(spec.weights), spec.code)

    def _load_step(self) -> Any:
        spec, me = self.spec, self.me
        return make_step(
            self.load_model(),
            replace(spec.recipe, augment="") if spec.head else spec.recipe,
            self.example(0),
            rank=me.rank,
            weight=me.weight,
            noise=spec.noise,
        )

    def _warm_up(self) -> None:
        images, labels = self.example(self.me.batch_size)
        self.step.set_step(0, 0.0)
        is_private = self.step.has_noise and self.me.num_private
        copies = np.ones(len(images), np.int64) if is_private else None
        self.step.rehearse(images, labels, copies, is_alone=len(self.spec.ranks) == 1)
