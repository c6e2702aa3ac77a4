"""`extract`: compute the features of a job's samples ahead of training."""

from typing import Protocol

from csdctl.shipping.deliver import Delivery
from csdctl.workflows.data.prepare import PreparationObserver, prepare_in
from csdctl.workflows.train.plan import resolve_plan
from csdctl.workflows.train.spec import plan_reading
from csdctl.workflows.train.strategies.features import FeatureRun, compute_features, find_features
from csdctl.workflows.train.strategies.strategy import RunContext
from csdctl.workflows.train.train import TrainRequest
from csdctl.workflows.workspace.workspace import open_workspace


class ExtractObserver(PreparationObserver, Protocol):
    """Shows one `csdctl extract`."""

    def on_delivery(self, node: str, delivery: Delivery, /) -> None:
        """Files have reached `node`."""


def extract(request: TrainRequest, observer: ExtractObserver) -> FeatureRun:
    """Compute the features that are missing, on the machines of the plan; raises InputError, PartialError."""
    job = request.job
    with open_workspace(
        request.directory, request.fleet, "extract", is_locking=True, say=observer.say
    ) as space:
        plan = resolve_plan(job, space, observer.say, path=request.plan_path, batch_size=request.batch_size)
        prepared = prepare_in(space, job, observer)
        find_features(prepared)
        spec, shards = plan_reading(plan, prepared, job, space)
        context = RunContext(job, prepared, space, observer, observer.on_delivery)
        return compute_features(spec, shards, context, request.options.features)
