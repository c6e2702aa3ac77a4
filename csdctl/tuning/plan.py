"""The plan: the result of tuning, as a file that a person can read and edit."""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field

from csdctl.documents import Document, load_document, save_text
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.tuning.plan_fingerprint import PlanFingerprint
from csdctl.worker.protocol.run_spec import Runtime

HEADER = """\
# Written by `csdctl tune`; `csdctl train` follows it. Batch sizes and threads may be edited:
# the shards are computed from them (equation 1) when training starts.
"""


class RankPlan(Document):
    """One rank: its settings, and the measurements with them."""

    node: str
    batch_size: Annotated[int, Field(ge=0)]
    """0: the rank does not train; it only sums and serves data to the nodes. Allowed only for the host."""
    threads: Annotated[int, Field(ge=1, le=1024)]
    inter_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Inter-op threads; `threads` are intra-op."""
    onednn: bool = True
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """A larger batch is computed in micro-batches of this size."""
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    """The largest batch that fits in memory: a bound for batch sizes that change during a run."""
    step_time_s: Annotated[float, Field(gt=0)] | None = None
    samples_per_s: Annotated[float, Field(gt=0)] | None = None
    peak_memory_bytes: int | None = None

    @property
    def runtime(self) -> Runtime:
        """TensorFlow's runtime settings."""
        return Runtime(self.threads, self.inter_threads, self.onednn)


def _each_node_once(ranks: list[RankPlan]) -> list[RankPlan]:
    names = [rank.node for rank in ranks]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is listed more than once")
        if name != HOST_NAME and not ranks[names.index(name)].batch_size:
            raise ValueError(f"{name}: only the host can have batch size 0; leave the node out instead")
    if not any(rank.batch_size for rank in ranks):
        raise ValueError("at least one rank must have a batch size above 0")
    return ranks


class Predicted(Document):
    """The prediction for the plan's batch sizes. Shares are of the ranks' time, and add up to 1."""

    global_batch: int
    batch_sizes: list[int] | None = None
    """Batch sizes in the order of the ranks; None: an older plan, which only has `global_batch`."""
    step_s: Annotated[float, Field(gt=0)]
    samples_per_s: Annotated[float, Field(gt=0)]
    compute_share: float
    imbalance_share: float
    communication_share: float
    gain: float | None = None
    """The gain in samples/s over the best equal batch size, predicted from the same measurements."""
    is_confirmed: bool = False
    """Whether the figures are from a trial of all ranks."""


class Plan(Document):
    """The ranks, rank 0 first, with the measurements they were computed from."""

    schema_version: Literal[1] = 1
    job: str
    job_fingerprint: str
    method: str
    emulated: bool = False
    method_arguments: dict[str, float | list[int]] = {}
    num_probes: int = 0
    measuring_s: float = 0.0
    predicted: Predicted | None = None
    left_out: list[str] = []
    """Nodes that would cost more time than they save."""
    made_for: PlanFingerprint | None = None
    """None: a plan written manually, or an older plan, which only has `job_fingerprint` to compare."""
    ranks: Annotated[list[RankPlan], Field(min_length=1), AfterValidator(_each_node_once)]

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes in rank order."""
        return [rank.batch_size for rank in self.ranks]

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return sum(self.batch_sizes)

    @property
    def prediction(self) -> Predicted | None:
        """The prediction of tuning; None when batch sizes were edited since."""
        if self.predicted is None:
            return None
        predicted_sizes = self.predicted.batch_sizes
        has_same_global_batch = self.predicted.global_batch == self.global_batch
        is_valid = has_same_global_batch and predicted_sizes in (None, self.batch_sizes)
        return self.predicted if is_valid else None

    @property
    def predicted_samples_per_s(self) -> float | None:
        """Predicted samples per second for these batch sizes.

        Without a prediction, an upper bound: steps as long as the slowest rank's, without communication.
        """
        if self.prediction:
            return self.prediction.samples_per_s
        times = [rank.step_time_s for rank in self.ranks if rank.batch_size]
        known = [time for time in times if time]
        return self.global_batch / max(known) if len(known) == len(times) else None


def save_plan(path: Path, plan: Plan) -> None:
    """Write the plan as YAML, atomically."""
    save_text(path, HEADER + yaml.safe_dump(plan.model_dump(exclude_none=True), sort_keys=False))


def load_plan(path: Path) -> Plan:
    """Read a plan; raises InputError when it is missing or damaged."""
    if not path.exists():
        raise InputError(
            f"there is no plan at {path}", remedy="run `csdctl tune` first, or train with --batch-size"
        )
    return load_document(path, Plan)
