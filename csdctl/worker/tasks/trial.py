"""Trials: the steps of a training with random samples, for measuring; they produce no model."""

from typing import Any

from csdctl.worker.compute.keras_internals import find_smallest_embedding
from csdctl.worker.data.prepared import SyntheticReader
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import from_dict
from csdctl.worker.protocol.run_spec import ELEMENT_SPEC
from csdctl.worker.tasks.split import Split
from csdctl.worker.tasks.train import Train


class Trial(Train):
    """Trains on random samples of the form in the task's argument `element_spec`."""

    def open_reader(self) -> SyntheticReader:
        """Return a reader of random samples."""
        element_spec = from_dict(DatasetInfo, self.spec.task.arguments[ELEMENT_SPEC])
        step = self._step_of_probes
        num_indices = find_smallest_embedding(step.model) if step else None
        return SyntheticReader(element_spec, self.me.rank, num_indices)

    @property
    def variables(self) -> list[Any]:
        """None: the weights of a trial teach nothing, and differ between probe sessions."""
        return []

    def compare_weights(self, communicator: Communicator) -> str:
        """Compare nothing: ranks that are probe sessions have different moving statistics."""
        return ""

    def save_model(self) -> str | None:
        """Save nothing."""
        return None


class SplitTrial(Split, Trial):
    """Trains a model in two parts on random samples of the form in the task's argument `element_spec`."""
