"""A trial with a model that is cut in two, with random samples; it produces no model."""

from csdctl.worker.tasks.split import Split
from csdctl.worker.tasks.trial import Trial


class SplitTrial(Split, Trial):
    """Trains a model in two parts on random samples of the form in the task's argument `element_spec`."""
