"""`extract`: compute the features of a job's samples ahead of training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.shipping.deliver import Delivery
from csdctl.worker.protocol.features import FeatureOptions
from csdctl.workflows.data.prepare import PreparationObserver, prepare_in
from csdctl.workflows.train.plan import check_one_source, resolve_plan
from csdctl.workflows.train.spec import plan_reading
from csdctl.workflows.train.strategies.features import COMPUTING, FeatureRun, compute_features, find_features
from csdctl.workflows.workspace.workspace import open_workspace


@dataclass(frozen=True)
class ExtractRequest:
    """The request of one `csdctl extract`."""

    job: Job
    fleet: Fleet
    directory: Path
    features: FeatureOptions
    plan_path: Path | None = None
    """None: the plan that `tune` wrote for the job."""
    batch_size: int | None = None
    """Divide public samples equally instead of by a plan."""

    def __post_init__(self) -> None:
        """Raise InputError for a plan and a batch size at once."""
        check_one_source(self.plan_path, self.batch_size)


class ExtractObserver(PreparationObserver, Protocol):
    """Shows one `csdctl extract`."""

    def on_delivery(self, node: str, delivery: Delivery, /) -> None:
        """Files have reached `node`."""


def extract(request: ExtractRequest, observer: ExtractObserver) -> FeatureRun:
    """Compute the features that are missing, on the machines of the plan; raises InputError, PartialError."""
    job = request.job
    with open_workspace(
        request.directory, request.fleet, "extract", is_locking=True, say=observer.say
    ) as space:
        plan = resolve_plan(job, space, observer.say, path=request.plan_path, batch_size=request.batch_size)
        prepared = prepare_in(space, job, observer)
        find_features(prepared)
        spec, shards = plan_reading(plan, prepared, job, space)
        with observer.preparing(COMPUTING, [rank.node for rank in spec.ranks]) as on_progress:
            return compute_features(
                spec, prepared, shards, space, request.features, observer.on_delivery, on_progress
            )
