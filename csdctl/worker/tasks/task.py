"""The interface between a task and the session that runs it, and the base of tasks with a model.

A new task is a subclass of `Task`, in a file of its own, and a line in `TASKS` (session.py).
"""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.forward import feature_pass
from csdctl.worker.compute.user_code import load_augmentation
from csdctl.worker.data.arrays import Array, hash_arrays
from csdctl.worker.data.prepared import EpochReader, SyntheticReader, sample_bytes
from csdctl.worker.engine.forward import BatchedPass
from csdctl.worker.engine.keras_file import Places, places_of_head, save_like
from csdctl.worker.engine.step import StepEngine, StepInfo, load_compiled, load_info
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.events import Joined, Misbehaved, describe_model
from csdctl.worker.protocol.json_codec import ProtocolError, Sha256, from_dict
from csdctl.worker.protocol.orders import Begin, OpenHub, Order, Ping, Probe, Stop, TakeSteps, order_from_line
from csdctl.worker.protocol.recipe import BF16
from csdctl.worker.protocol.run_spec import ELEMENT_SPEC, GROWTH_LIMIT, CompiledStep, RankSpec, RunSpec
from csdctl.worker.tasks.progress import Position, Reporter, RunProgress, hash_state, pack

ORPHAN_S = 600.0
"""A rank that takes no part and receives no order for this long exits."""
FINISHED = ""
"""Value that `Task.run` returns after the last epoch."""

OrderT = TypeVar("OrderT", bound=Order)


class Orders:
    """The orders that this rank has received."""

    def __init__(self, on_ping: Callable[[int], None]) -> None:
        """`on_ping` is called by the thread with the number of each `Ping`."""
        self.is_stopping = False
        self.measurements: queue.Queue[Probe | TakeSteps] = queue.Queue()
        """Next measurements of a tuning run."""
        self.hubs: queue.Queue[OpenHub] = queue.Queue()
        self.begins: queue.Queue[Begin] = queue.Queue()
        self._on_ping = on_ping
        self._heard = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def check_orphaned(self) -> None:
        """Raise WorkerError when no order of any kind has come for too long."""
        if time.monotonic() - self._heard > ORPHAN_S:
            raise WorkerError(f"received no order for {ORPHAN_S:g} s: csdctl has exited or is disconnected")

    def wait(self, orders: "queue.Queue[OrderT]") -> OrderT:
        """Return the next of these orders. Raises WorkerError when no order of any kind comes in time."""
        self._heard = time.monotonic()  # loading may have taken long
        while True:
            self.check_orphaned()
            with contextlib.suppress(queue.Empty):
                return orders.get(timeout=1.0)

    def _read(self) -> None:
        for line in sys.stdin:
            try:
                order = order_from_line(line)
            except ProtocolError:
                continue
            self._heard = time.monotonic()
            if isinstance(order, OpenHub):
                self.hubs.put(order)
            elif isinstance(order, Begin):
                self.begins.put(order)
            elif isinstance(order, Stop):
                self.is_stopping = True
            elif isinstance(order, Probe | TakeSteps):
                self.measurements.put(order)
            elif isinstance(order, Ping):
                self._on_ping(order.number)
        os._exit(1)


@dataclass(frozen=True)
class TaskContext:
    """Objects that a task gets from its session."""

    spec: RunSpec
    me: RankSpec
    progress: RunProgress
    reporter: Reporter
    orders: Orders


class Task:
    """Work that the ranks of a run do together. By default it has nothing to load and no state."""

    values: Sequence[Array] = ()
    """The state that a rank takes over from rank 0 when it differs, in addition to the progress."""

    def __init__(self, context: TaskContext) -> None:
        self.spec, self.me, self.progress = context.spec, context.me, context.progress
        self.reporter, self.orders, self.is_root = context.reporter, context.orders, context.me.rank == 0

    @property
    def sum_sizes(self) -> Sequence[tuple[int, int]]:
        """The vectors that the ranks sum in a step, in their order. Known after `load`.

        For each vector: its elements, and how many of them are sent as bfloat16.
        """
        raise NotImplementedError

    @property
    def max_message_bytes(self) -> int:
        """The largest message between two ranks, in addition to the state. Known after `load`."""
        return 0

    def load(self) -> None:
        """Load what the task needs and reach full speed. Raises WorkerError."""

    def settle(
        self, communicator: Communicator, before: Sequence[int], hashes: Mapping[int, str] = {}
    ) -> None:
        """Divide the work anew if other ranks take part than `before`.

        Rank 0 reports the members, and sends its state to the ranks that have joined, unless their hash in
        `hashes` is the same.
        """
        if not self.is_root:
            return
        for rank in sorted(communicator.admitted):
            communicator.give_state(rank, b"")
        communicator.admitted = set()
        members, start = {str(rank): 1 for rank in communicator.members}, Position(1, 0, 0, None, {})
        self._report_members(communicator, start, members, is_start=not before, steps_per_epoch=1)

    def _report_members(
        self, communicator: Communicator, position: Position, batch_sizes: dict[str, int], **fields: Any
    ) -> None:
        """Report the ranks that take part from now on, and the lost ones."""
        lost = tuple((rank, reason) for rank, reason, _ in communicator.lost)
        communicator.lost = []
        at = {"epoch": position.epoch, "step": position.step, "total_steps": position.total_steps}
        self.reporter.emit(Joined, batch_sizes=batch_sizes, lost=lost, **at, **fields)

    def run(self, communicator: Communicator) -> str:
        """Work with the other ranks until the task is finished. Return `Finished.reason`.

        Raises LinkLostError when the link is lost, and WorkerError when the task fails.
        """
        raise NotImplementedError

    def finish(self, reason: str) -> None:
        """Report the completion record, after the ranks have disconnected."""
        self.reporter.finished(self.progress.position, "", None, reason)


class ModelTask(Task):
    """Loads data, model and step of one rank, and warms them up."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self._extractor: BatchedPass | None = None
        # Importing TensorFlow is not part of the set-up time that the rank reports.
        if not self._compiled:
            load_backend(context.me.runtime)

    @property
    def sum_sizes(self) -> list[tuple[int, int]]:
        """As in `Task`."""
        is_halved = self.spec.recipe.compression == BF16
        return [
            (
                int(layout.step_size + 3 + len(self.spec.ranks)),
                int(layout.gradients.stop) // 2 * 2 if is_halved else 0,
            )
            for layout in self.summed.layouts
        ]

    @property
    def values(self) -> Sequence[Array]:
        """Weights and the state of the optimizer."""
        return self.step.values

    @values.setter
    def values(self, values: Sequence[Array]) -> None:
        self.step.values = values

    @property
    def max_message_bytes(self) -> int:
        """As in `Task`."""
        return max(self.max_batch_sizes.values()) * sample_bytes(*self.reader.first(0))

    @property
    def max_batch_sizes(self) -> dict[int, int]:
        """The largest batch that each rank may get when batch sizes are balanced."""
        return {rank.rank: rank.max_batch_size or GROWTH_LIMIT * rank.batch_size for rank in self.spec.ranks}

    def settle(
        self, communicator: Communicator, before: Sequence[int], hashes: Mapping[int, str] = {}
    ) -> None:
        """As in `Task`. The latest step did not count the ranks `before` that are not in its verdict."""
        members, counted = communicator.members, communicator.counted
        joined = sorted((set(members) - set(before) | communicator.admitted) - {communicator.rank})
        if not joined and members == tuple(before) == counted:
            return
        progress, values = self.progress, self.values
        state_hash = hash_state(values, progress.position) if hashes else ""
        progress.regroup(members, set(before) - set(counted))
        communicator.admitted = set()
        if not self.is_root:
            return
        # This comes first, so that it is reported even if this process ends now.
        for rank, reason, is_fault in communicator.lost:
            if is_fault:
                self.reporter.emit(Misbehaved, rank, reason)
        position, segment = progress.position, progress.segment
        self._report_members(
            communicator,
            position,
            {str(share.rank): share.batch_size for share in segment.shares},
            is_start=bool(hashes) or not before,
            steps_per_epoch=segment.stop_step,
            num_lost=progress.num_lost(),
            epoch_samples=position.totals.samples,
        )
        packed = pack(values, progress.position).tobytes() if joined else b""
        for rank in joined:
            state = b"" if hashes and hashes.get(rank) == state_hash else packed
            communicator.give_state(rank, state)

    def load(self) -> None:
        """Load data and model, trace the graphs and reach full speed. The weights stay as they were."""
        self.reader = self.open_reader()
        self.step = self._load_step()
        if isinstance(self.reader, SyntheticReader):  # how many indices the model has is known now
            self.reader.num_indices = self.step.info.num_indices
        self.step.micro_batch_size = self.me.micro_batch_size
        self.layout = self.summed.layout
        self.reporter.metrics = self.step.metrics
        self.restore()
        self._warm_up()

    @property
    def summed(self) -> Any:
        """The engine that computes the vectors that the ranks sum, and applies their sum."""
        return self.step

    def restore(self) -> None:
        """Load the state of an earlier process of this run, if the task saves its state."""

    @property
    def element_spec(self) -> DatasetInfo:
        """The form of the random samples of a task without data."""
        form: DatasetInfo = from_dict(DatasetInfo, self.spec.task.arguments[ELEMENT_SPEC])
        return form

    def open_reader(self) -> EpochReader | SyntheticReader:
        """Return the reader of this rank's samples, or of random ones if the task's arguments have a form."""
        if ELEMENT_SPEC in self.spec.task.arguments:
            return SyntheticReader(self.element_spec, self.me.rank)
        return EpochReader(self.spec, self.me.rank, self.to_features if self.spec.head else None)

    def example(self, count: int) -> tuple[Array, Array]:
        """Return at most `count` samples and their labels, as the model takes them."""
        return self.reader.first(count)

    def to_features(self, samples: Array) -> Array:
        """Return the features of samples (n, …), computed by the model's layers before the head."""
        if self._extractor is None:
            assert self.spec.head is not None
            self._extractor = feature_pass(self.spec.head.prefix, self.me.runtime)
        return self._extractor.run(samples)

    def share_hash(self, communicator: Communicator) -> tuple[str, list[int]]:
        """Return the hash of the weights, and the ranks whose hash differs from rank 0's."""
        weights_hash = hash_arrays(self.summed.weights)
        hashes = communicator.gather(weights_hash, Sha256)
        return weights_hash, [rank for rank, digest in hashes.items() if digest != hashes[0]]

    def other_weights(self, when: str, ranks: Iterable[int]) -> WorkerError:
        """Return the error for ranks of the run that have other weights than rank 0."""
        nodes = ", ".join(self.spec.ranks[rank].node for rank in ranks)
        return WorkerError(
            f"after {when} the weights of {nodes} differ from rank 0's",
            remedy="check for failing memory or different TensorFlow versions: `csdctl discover`",
        )

    @property
    def _compiled(self) -> CompiledStep | None:
        split = self.spec.split
        return split.compiled if split and self.me.rank else self.spec.compiled

    def _load_step(self) -> StepEngine:
        spec, me = self.spec, self.me
        recipe = replace(spec.recipe, augment="") if spec.head else spec.recipe
        if self._compiled:
            augmentation = load_augmentation(recipe.augment, recipe.seed, spec.code)
            return StepEngine(
                *load_compiled(self._compiled, StepInfo, me.runtime),
                recipe.seed,
                rank=me.rank,
                weight=me.weight,
                noise=spec.noise,
                augmentation=augmentation,
            )
        from csdctl.worker.compute.compile import build_engine

        return build_engine(spec, me, recipe, self.example(0))

    def save_trained(self, path: Path) -> Path:
        """Save the trained model as .keras, or its weights if Keras cannot save it. Return the path.

        If an optimizer keeps moving averages of the weights, they are saved. Raises OSError.
        """
        step = self.step
        values = [*step.averaged_values(), *step.rates]
        comment = describe_model(self.spec.run_id, hash_arrays(self.summed.weights))
        template, places = self._template(step.info)
        if places:
            return save_like(template, places, values, path, comment)
        from csdctl.worker.compute.compile import save_with_keras

        load_backend(self.me.runtime)
        return save_with_keras(self.spec, self.example(0), values, path, comment)

    def _template(self, info: StepInfo) -> tuple[str, Places]:
        """Return a Keras file of the whole model, and where it has the step's variables, {} if unknown."""
        head = self.spec.head
        compiled = head.compiled if head else self.spec.compiled
        if not compiled:
            return "", {}
        if not head:
            return compiled.template, info.places
        return compiled.template, places_of_head(info, load_info(compiled, StepInfo), head.head_weights)

    def _warm_up(self) -> None:
        images, labels = self.example(self.me.batch_size)
        self.step.set_step(0, 0.0)
        is_private = self.step.has_noise and self.me.num_private
        copies = np.ones(len(images), np.int64) if is_private else None
        self.step.rehearse(images, labels, copies)
