"""What a strategy decides about a run, and data-parallel, which changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from csdctl.job.model import Job
from csdctl.tuning.plan import Plan
from csdctl.tuning.strategies import DATA_PARALLEL
from csdctl.worker.protocol.features import Recomputed
from csdctl.workflows.data.deploy import OnDelivery
from csdctl.workflows.data.prepare import PreparationObserver, Prepared
from csdctl.workflows.train.run import RunInputs
from csdctl.workflows.workspace.workspace import Workspace


@dataclass(frozen=True)
class RunContext:
    """Job, data and machines that a strategy works with."""

    job: Job
    prepared: Prepared
    space: Workspace
    observer: PreparationObserver
    on_delivery: OnDelivery = lambda *_: None


class Strategy:
    """Data-parallel: every rank holds the whole model. Other strategies override what they do differently.

    An instance belongs to one run; its methods are called in the order in which they stand here.
    """

    name: ClassVar[str] = DATA_PARALLEL
    cut = ""
    """The last layer that nodes compute, if the model is split."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the ranks that train. Raises InputError or PartialError."""
        return plan

    def build_inputs(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run with what its ranks compute and read. Raises InputError or PartialError."""
        return inputs

    def build_verification(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run that compares one step with one process. Raises InputError or PartialError."""
        return inputs

    def recompute_stored(self, inputs: RunInputs, context: RunContext) -> Mapping[str, Recomputed]:
        """Return, by machine, how results that are stored there compare with what it computes now."""
        return {}
