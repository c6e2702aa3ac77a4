"""What the tasks have in common that compute with the run's model and data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.forward import BatchedPass, feature_pass
from csdctl.worker.compute.model import load
from csdctl.worker.compute.step import Step
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.prepared import EpochReader, SyntheticReader
from csdctl.worker.tasks.task import TaskContext


class ModelTask:
    """Loads data, model and step of one rank, and warms them up."""

    is_resumable = True

    def __init__(self, context: TaskContext) -> None:
        self.spec, self.me, self.progress = context.spec, context.me, context.progress
        self.reporter, self.orders, self.is_root = context.reporter, context.orders, context.is_root
        self._step_of_probes = context.step
        self._extractor: BatchedPass | None = None
        # Importing TensorFlow is not part of the set-up time that the rank reports.
        backend: tuple[Any, Any] = (None, None) if context.step else load_backend(context.me.runtime)
        self._tf, self._keras = backend

    @property
    def num_elements(self) -> int:
        """Elements of the vector that the ranks sum."""
        return int(self.layout.size)

    @property
    def variables(self) -> list[Any]:
        """Weights and optimizer state, but for the learning rate, which every step sets."""
        return [variable for variable in self.step.state if variable is not self.step.optimizer.learning_rate]

    def load(self) -> None:
        """Load data and model, trace the graphs and reach full speed; the weights stay as they were."""
        self.reader = self.open_reader()
        self.step = self._step_of_probes or self._load_step()
        self.step.micro_batch_size = self.me.micro_batch_size
        self.layout = replace(self.summed.layout, num_ranks=len(self.spec.ranks))
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
        return EpochReader(self.spec, self.me.rank, self.to_features if self.spec.head else _unchanged)

    def example(self, count: int) -> tuple[Array, Array]:
        """Return at most `count` samples and their labels, as the model takes them."""
        return self.reader.first(count) if count else self.reader.empty_batch()

    def to_features(self, samples: Array) -> Array:
        """Return the features of samples (n, …), as the model before the head computes them here."""
        if self._extractor is None:
            assert self.spec.head is not None
            # Rank 0 judges what the others compute, by whatever engine: it computes with Keras.
            self._extractor = feature_pass(
                self.spec.head.prefix,
                lambda: (self._tf, self._keras),
                self.me.runtime.threads,
                is_keras=self.is_root,
            )
        return self._extractor.run(samples)

    def load_model(self) -> Any:
        """Return the run's model, compiled."""
        spec = self.spec
        return load(Path(spec.architecture), Path(spec.weights), self._keras, spec.code)

    def _load_step(self) -> Step:
        spec, me = self.spec, self.me
        return Step(
            self.load_model(),
            replace(spec.recipe, augment="") if spec.head else spec.recipe,
            self.example(0),
            self._tf,
            self._keras,
            rank=me.rank,
            weight=me.weight,
            noise=spec.noise,
        )

    def _warm_up(self) -> None:
        images, labels = self.example(self.me.batch_size)
        self.step.set_step(0, 0.0)
        is_private = self.step.has_noise and self.me.num_private
        copies = np.ones(len(images), np.int64) if is_private else None
        for _ in range(2):
            self.step.local(images, labels)
            if copies is not None:
                self.step.local(images, labels, private_copies=copies)
        if len(self.spec.ranks) == 1:
            self.step.rehearse_alone(images, labels)
        self.step.rehearse_apply()


def _unchanged(samples: Array) -> Array:
    return samples
