"""The plan: the result of tuning, as a file that a person can read and edit, and what has changed since."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import AfterValidator, Field, PlainSerializer, model_validator, with_config

from csdctl.documents import STRICT, Document, load_document, load_text, parse_yaml
from csdctl.errors import InputError, option
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.names import NAME
from csdctl.perfmodel.spread import Range
from csdctl.worker.protocol.durable_files import save_text
from csdctl.worker.protocol.run_spec import Runtime

Strategy = Literal["data-parallel", "features", "split"]
DATA_PARALLEL: Final = "data-parallel"
FEATURES: Final = "features"
SPLIT: Final = "split"
STRATEGIES = (DATA_PARALLEL, FEATURES, SPLIT)
"""Computation of the ranks: the whole model in each step, its frozen part once for each sample, or, on nodes,
the part of the model before a cut."""
HEADER = """\
# Written by `csdctl tune`; `csdctl train` follows it. Batch sizes and threads may be edited:
# the shards are computed from them (equation 1) when training starts.
"""
UPDATE = "update this csdctl"
MAX_BATCH_SIZE = 1 << 20
MAX_THREADS = 1024

Machine = Annotated[str, Field(pattern=f"^{NAME.pattern}(/{NAME.pattern})?$")]
Size = Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Positive = Annotated[float, Field(gt=0)]
Rounded = Annotated[float, PlainSerializer(lambda value: round(value, 3))]
"""In the file, to three places."""


class PlanFingerprint(Document):
    """The job and the machines that a plan was tuned for."""

    job: dict[str, Any] = {}
    """Values by their names in job.yaml, without those that are not set."""
    files: dict[str, str] = {}
    """A hash of the content of each of the user's files, by path."""
    machines: dict[str, str] = {}
    """The description of each rank's machine (`MachineClass.name`)."""


def list_changes(then: PlanFingerprint, now: PlanFingerprint) -> list[str]:
    """List the differences, one line each. A machine that only one of them has is not a change."""
    values = {name: (then.job.get(name), now.job.get(name)) for name in {**now.job, **then.job}}
    return [
        *(
            f"{name}: {_show(value)}, was {_show(before)} when tuned"
            for name, (before, value) in values.items()
            if before != value
        ),
        *(f"{PurePath(path).name} has changed" for path in _changed(then.files, now.files)),
        *(
            f"{name}: {now.machines[name]}, was {then.machines[name]}"
            for name in _changed(then.machines, now.machines)
        ),
    ]


def _changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name in now if then.get(name, now[name]) != now[name]]


def _show(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)


@with_config(STRICT)
@dataclass(frozen=True, kw_only=True)
class RankPlan(Runtime):
    """One rank: TensorFlow's settings, its batch size, and the measurements with them."""

    node: Machine
    batch_size: Annotated[int, Field(ge=0, le=MAX_BATCH_SIZE)]
    """0: the rank does not train. It only sums and serves data to the nodes. Allowed only for the host."""
    threads: Threads = field()
    """Intra-op threads."""
    inter_threads: Threads = 1
    micro_batch_size: Size | None = None
    """A larger batch is computed in micro-batches of this size."""
    max_batch_size: Size | None = None
    """The largest batch that fits in memory: a bound for batch sizes that change during a run."""
    step_time_s: Positive | None = None
    samples_per_s: Positive | None = None
    peak_memory_bytes: Annotated[int, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.max_batch_size and self.batch_size > self.max_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is above max_batch_size {self.max_batch_size}, the largest "
                "that fits in memory"
            )

    @classmethod
    def with_runtime(cls, runtime: Runtime, **fields: Any) -> Self:
        """Return a rank with the settings of `runtime` and its other fields."""
        return cls(**asdict(runtime), **fields)

    @property
    def runtime(self) -> Runtime:
        """Only TensorFlow's settings."""
        return Runtime(self.threads, self.inter_threads, self.onednn, self.device)

    @property
    def current_step_time_s(self) -> float | None:
        """Seconds of a step with `batch_size`. None if the batch size was edited since it was measured."""
        if not self.step_time_s or not self.samples_per_s:
            return self.step_time_s
        measured = self.samples_per_s * self.step_time_s  # of rounded numbers
        return self.step_time_s if abs(measured - self.batch_size) < 0.5 + 0.005 * self.step_time_s else None

    def with_step(self, batch_size: int, step_time_s: float) -> "RankPlan":
        """Return the rank with this batch size, and the measured or modelled time of its step."""
        return replace(
            self,
            batch_size=batch_size,
            step_time_s=round(step_time_s, 6) if batch_size else None,
            samples_per_s=round(batch_size / step_time_s, 2) if batch_size else None,
        )


def _check_ranks(ranks: list[RankPlan]) -> list[RankPlan]:
    if ranks[0].node != HOST_NAME:
        raise ValueError(
            f"the first rank is not `{HOST_NAME}` but {ranks[0].node}; a host that does not train has "
            "batch_size 0"
        )
    for name, count in Counter(rank.node for rank in ranks).items():
        if count > 1:
            raise ValueError(f"{name} is listed more than once")
    for rank in ranks[1:]:
        if not rank.batch_size:
            raise ValueError(f"{rank.node}: only the host can have batch size 0; leave the node out instead")
    if not any(rank.batch_size for rank in ranks):
        raise ValueError("at least one rank must have a batch size above 0")
    return ranks


class Predicted(Document):
    """The prediction for the plan's batch sizes. Shares are of the ranks' time, and add up to 1."""

    global_batch: Annotated[int, Field(ge=1)]
    batch_sizes: list[Annotated[int, Field(ge=0, le=MAX_BATCH_SIZE)]]
    """In the order of the ranks."""
    step_s: Positive
    samples_per_s: Positive
    samples_per_s_range: tuple[Positive, Positive] | None = None
    """9 of 10 runs are expected to reach a throughput in it (perfmodel/spread.py)."""
    host_samples_per_s: Positive | None = None
    """Throughput predicted for the host alone, with the batch size that tuning would choose for it."""
    compute_share: float
    imbalance_share: float
    communication_share: float
    is_confirmed: bool = False
    """Whether the figures are from a trial of all ranks."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if sum(self.batch_sizes) != self.global_batch:
            raise ValueError(
                f"batch_sizes add up to {sum(self.batch_sizes)}, but global_batch is {self.global_batch}"
            )
        return self


class StrategyPlan(Document):
    """A strategy that was compared with the others. Seconds are of a whole training."""

    strategy: Strategy
    cut: str = ""
    first_run_s: Rounded | None = None
    first_run_s_range: tuple[Rounded, Rounded] | None = None
    """9 of 10 first runs are expected to take a time in it (perfmodel/spread.py)."""
    next_run_s: Rounded | None = None
    """Of another training with the same frozen layers."""
    epoch_s: Rounded | None = None
    sample_bytes: Rounded | None = None
    """Bytes that a node sends and receives in an epoch for each of its samples."""
    is_confirmed: bool = False
    """Whether the time of a step is from a trial."""
    trains_on_host: bool = False
    """As the plan's."""
    why_not: str = ""
    """Why the model cannot be trained so, or why that was not measured."""


class Plan(Document):
    """The ranks, rank 0 first, with the measurements they were computed from."""

    schema_version: Literal[1] = 1
    job: str
    job_fingerprint: str
    method: str
    emulated: bool = False
    method_arguments: dict[str, float | list[int]] = {}
    num_probes: Annotated[int, Field(ge=0)] = 0
    measuring_s: Annotated[float, Field(ge=0)] = 0.0
    predicted: Predicted | None = None
    strategy: Strategy = DATA_PARALLEL
    """The way in which machines share the computation (docs/how-to/tune-a-job.md)."""
    cut: str = ""
    """For `split`: the last layer that nodes compute."""
    trains_on_host: bool = False
    """For `features` of only public samples: all machines compute them, the host trains on all of them."""
    strategies: list[StrategyPlan] = []
    """The strategies that were compared."""
    left_out: list[str] = []
    """Nodes that would cost more time than they save."""
    made_for: PlanFingerprint | None = None
    """None: a plan written manually, which only has `job_fingerprint` to compare."""
    ranks: Annotated[list[RankPlan], Field(min_length=1), AfterValidator(_check_ranks)]

    @property
    def nodes(self) -> list[str]:
        """The machines in rank order."""
        return [rank.node for rank in self.ranks]

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes in rank order."""
        return [rank.batch_size for rank in self.ranks]

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return sum(self.batch_sizes)

    def with_ranks(self, ranks: list[RankPlan]) -> "Plan":
        """Return the plan with some of its ranks, without what was predicted and compared for all."""
        blank: dict[str, object] = {"predicted": None, "strategies": [], "left_out": []}
        return self.model_copy(update={"ranks": ranks, "trains_on_host": False, **blank})

    def for_host_alone(self) -> "Plan":
        """Return the plan whose only rank is the host's, with the same global batch."""
        host = self.ranks[0]
        alone = RankPlan.with_runtime(
            host.runtime, node=host.node, batch_size=self.global_batch, micro_batch_size=host.micro_batch_size
        )
        return self.model_copy(update={"ranks": [alone], "predicted": None})

    @property
    def prediction(self) -> Predicted | None:
        """The prediction of tuning. None when batch sizes were edited since."""
        is_valid = self.predicted is not None and self.predicted.batch_sizes == self.batch_sizes
        return self.predicted if is_valid else None

    @property
    def predicted_samples_per_s(self) -> float | None:
        """Predicted samples per second for these batch sizes.

        Without a prediction, an upper bound: steps as long as the slowest rank's, without communication.
        """
        if self.prediction:
            return self.prediction.samples_per_s
        times = [rank.current_step_time_s for rank in self.ranks if rank.batch_size]
        return None if None in times else self.global_batch / max(filter(None, times))

    @property
    def predicted_range(self) -> Range | None:
        """The range that holds the throughput of 9 of 10 runs. None without a prediction."""
        return self.prediction.samples_per_s_range if self.prediction else None


def check_schema(content: object, path: Path, expected: int) -> None:
    """Raise InputError if the content of `path` has a newer schema than `expected`."""
    schema = isinstance(content, dict) and content.get("schema", content.get("schema_version"))
    if type(schema) is int and schema > expected:
        problem = f"{path} was written by a newer csdctl: received schema {schema}, expected {expected}"
        raise InputError(problem, remedy=UPDATE)


def save_plan(path: Path, plan: Plan) -> None:
    """Write the plan as YAML, atomically."""
    content = plan.model_dump(exclude_none=True)
    content["ranks"] = [{"node": rank["node"], "batch_size": 0} | rank for rank in content["ranks"]]
    save_text(path, HEADER + yaml.safe_dump(content, sort_keys=False))


def load_plan(path: Path) -> Plan:
    """Read a plan. Raises InputError when it is missing, damaged, or of a newer csdctl."""
    remedy = f"run `csdctl tune` first, or train with {option('batch_size')}"
    try:
        return load_document(path, Plan, remedy=remedy)
    except InputError:
        if path.is_file():
            check_schema(parse_yaml(load_text(path), str(path))[1], path, 1)
        raise
