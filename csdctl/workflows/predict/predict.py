"""`predict`: run a trained model over samples where they lie, and bring back what was asked for.

Each machine keeps its results by content, and continues them after an interruption. What it sends are rows
of numbers: of private samples neither the samples nor their names.
"""

import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csdctl.errors import CsdctlError, PartialError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME
from csdctl.shipping.worker_calls import call_worker, fetch_results
from csdctl.transport.many import Outcome, errors_of, run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.worker.protocol.features import RESULT_STORE, Extracted, ExtractSpec, ResultRule, SendSpec
from csdctl.worker.protocol.run_spec import Prefix
from csdctl.workflows.data.deploy import common_files, deploy_files, whole
from csdctl.workflows.data.prepare import (
    DeliveryObserver,
    OnPrepareProgress,
    Prepared,
    check_info,
    load_prepared,
    prepare_in,
)
from csdctl.workflows.predict.request import (
    CLASSES,
    EMBEDDINGS,
    PRIVATE,
    PUBLIC,
    SCORES,
    VALIDATION,
    Block,
    PredictRequest,
    build_rules,
    check_layer,
    write_results,
)
from csdctl.workflows.train.plan import default_runtime
from csdctl.workflows.train.strategies.features import check_parts
from csdctl.workflows.workspace.workspace import Workspace, open_workspace

_DOING = "predicting"
TRAFFIC = {
    CLASSES: TrafficClass.CLASSES,
    SCORES: TrafficClass.SCORES,
    EMBEDDINGS: TrafficClass.EMBEDDINGS,
}
MAX_HEADER_BYTES = 1 << 16


@dataclass
class PredictResult:
    """Number of rows that were predicted, and the rows that are missing."""

    output: Path
    num_rows: int = 0
    num_computed: int = 0
    """Rows that no earlier call had computed."""
    num_rows_of: dict[str, int] = field(default_factory=dict)
    """Rows by the machine that computed them."""
    missing: dict[str, CsdctlError] = field(default_factory=dict)
    """Nodes whose rows are missing, and why."""
    num_missing: dict[str, int] = field(default_factory=dict)
    """Missing rows by node, where the number is known."""
    elapsed_s: float = 0.0

    def check(self) -> None:
        """Raise PartialError if rows are missing."""
        if not self.missing:
            return
        nodes = ", ".join(
            f"{name} ({self.num_missing[name]:,})" if name in self.num_missing else name
            for name in self.missing
        )
        reasons = "".join(f"\n  {error}" for error in self.missing.values())
        raise PartialError(
            f"private rows of {nodes} are missing; {self.output} has the other {self.num_rows:,}{reasons}",
            remedy="repair these nodes and run the same command again: it computes what is missing",
        )


def predict(request: PredictRequest, observer: DeliveryObserver) -> PredictResult:
    """Predict, and write what there is to `request.output`; what is missing is in the result.

    Raises InputError if model and data do not fit, CsdctlError if there is no row at all.
    """
    began = time.monotonic()
    absent: dict[str, CsdctlError] = {}

    def on_absent(errors: Mapping[str, CsdctlError]) -> None:
        absent.update(errors)
        observer.say(f"continuing without {', '.join(errors)}, which cannot be reached")

    with open_workspace(
        request.directory,
        request.fleet,
        "predict",
        is_locking=True,
        say=observer.say,
        on_absent=on_absent,
    ) as space:
        record = load_prepared(space.project, request.job)
        num_private = dict(record.num_private) if record else {}
        prepared = prepare_in(space, request.model_job, observer, needs_labels=False)
        num_private |= prepared.num_private
        rules = build_rules(prepared.model.info, request.want)
        if request.layer:
            check_layer(request.layer, prepared.model)
        with tempfile.TemporaryDirectory(".predict", dir=space.project.state) as directory:
            prediction = _Prediction(request, prepared, space, rules, Path(directory), observer)
            found, failed = prediction.run(list_parts(request, prepared))
            result = _count(request.output, found)
            if PRIVATE in request.on:
                result.missing = absent | failed
                result.num_missing = {
                    name: num_private[name] for name in result.missing if name in num_private
                }
            if result.missing and not result.num_rows:
                outcomes = {name: Outcome[None](name, error=error) for name, error in result.missing.items()}
                values_or_raise(outcomes, _DOING)
            write_results(request.output, found, list(prepared.public.class_counts))
            result.elapsed_s = time.monotonic() - began
            return result


@dataclass(frozen=True)
class Part:
    """A data set that one machine predicts, where it is stored."""

    data: str
    """PUBLIC, VALIDATION or PRIVATE."""
    machine: str
    info: DatasetInfo

    @property
    def label(self) -> str:
        """The name for the progress."""
        return self.machine if self.data == PRIVATE else self.data


def list_parts(request: PredictRequest, prepared: Prepared) -> list[Part]:
    """Return the data sets in the order of the rows: those of the host before those of the nodes."""
    of_host = {PUBLIC: prepared.public, VALIDATION: prepared.validation}
    return [
        *(Part(data, HOST_NAME, info) for data, info in of_host.items() if info and data in request.on),
        *(Part(PRIVATE, node, info) for node, info in prepared.private.items() if PRIVATE in request.on),
    ]


def _count(output: Path, found: list[Block]) -> PredictResult:
    by_machine: Counter[str] = Counter()
    for one in found:
        by_machine[one.node] += len(one)
    num_computed = sum(one.num_computed for one in found)
    return PredictResult(output, by_machine.total(), num_computed, dict(by_machine))


@dataclass(frozen=True)
class _Prediction:
    """The predictions of one call."""

    request: PredictRequest
    prepared: Prepared
    space: Workspace
    rules: tuple[ResultRule, ...]
    directory: Path
    observer: DeliveryObserver

    def run(self, parts: list[Part]) -> tuple[list[Block], dict[str, CsdctlError]]:
        """Return the results in the order of `parts`, and the errors of nodes; raises that of the host."""
        by_machine: dict[str, list[Part]] = {}
        for part in parts:
            by_machine.setdefault(part.machine, []).append(part)
        fleet, sessions = self.space.fleet, self.space.sessions
        with self.observer.preparing(_DOING, [part.label for part in parts]) as on_progress:

            def on_machine(name: str) -> list[Block]:
                if name != HOST_NAME:
                    files = {name: common_files(self.prepared)}
                    deploy_files(files, fleet, sessions, self.observer.on_delivery)
                return [self._predict(part, on_progress) for part in by_machine[name]]

            outcomes = run_on_all({name: name for name in by_machine}, on_machine)
        failed = errors_of(outcomes)
        if HOST_NAME in failed:
            raise failed[HOST_NAME]
        return [found for name in by_machine for found in outcomes[name].value or ()], failed

    def _predict(self, part: Part, on_progress: OnPrepareProgress) -> Block:
        import numpy as np

        request, prepared, space = self.request, self.prepared, self.space
        session, python = space.sessions[part.machine], space.fleet.python_of(part.machine)
        model, worker = prepared.model, prepared.worker.path
        whole_model = Prefix(
            model.architecture.path, model.weights.path, prepared.recipe.input_range, code=model.user_code
        )
        runtime = default_runtime(part.machine, space.fleet, space.facts)
        spec = ExtractSpec(whole(part.info), RESULT_STORE, whole_model, runtime, self.rules, request.layer)

        def note(progress: PrepareProgress) -> None:
            on_progress(part.label, progress)

        extracted = call_worker(session, python, worker, "extract", spec, Extracted, note, doing=_DOING)
        check_parts(extracted, 1, part.machine, _DOING)
        (info,) = extracted.parts
        check_info(info, part.machine, _DOING, may_be_empty=True)
        dtype = self._check_dtype(info, part)
        target = self.directory / f"{part.data}-{part.machine}.npy"
        num_bytes = part.info.num_samples * dtype.itemsize + MAX_HEADER_BYTES
        wanted = SendSpec(Path(info.path).name, info.images_sha256, num_bytes)
        traffic = TRAFFIC[request.want] if part.data == PRIVATE else TrafficClass.PUBLIC
        with target.open("wb") as file:
            fetch_results(session, python, worker, wanted, file, traffic, doing=_DOING)
        records = _load(target, part, dtype)
        fields = {name: records[name] for name in records.dtype.names}
        return Block(part.data, part.machine, np.arange(len(records)), fields, extracted.num_computed)

    def _check_dtype(self, info: DatasetInfo, part: Part) -> Any:
        """Return the type of a row; raises RemoteCommandError if it is not what was asked for."""
        import numpy as np

        expected = {
            name: ("float32" if name.endswith(("value", "probability")) else "int32")
            for rule in self.rules
            for name in rule.fields
        }
        found = info.inputs
        is_as_asked = {name: dtype for name, (dtype, _) in found.items()} == expected and not any(
            shape for name, (_, shape) in found.items() if not name.endswith("value")
        )
        if info.num_samples != part.info.num_samples or info.sample_shape or not is_as_asked:
            raise _refusal(
                part,
                f"received {info.num_samples} rows of {', '.join(found)}, "
                f"expected {part.info.num_samples} of {', '.join(expected)}",
            )
        if math.prod(size for _, shape in found.values() for size in shape) > 1 << 40:
            raise _refusal(part, "received rows that are too large")
        return np.dtype([(name, dtype, tuple(shape)) for name, (dtype, shape) in found.items()])


def _refusal(part: Part, problem: str) -> RemoteCommandError:
    return RemoteCommandError(f"{_DOING}: {problem}", node=part.machine)


def _load(path: Path, part: Part, dtype: Any) -> Any:
    """Return the mapped records of a fetched file; raises RemoteCommandError for any other content."""
    import numpy as np

    try:
        records = np.load(path, mmap_mode="r" if part.info.num_samples else None, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python, and passes on all of its errors
        problem = f"received results that cannot be read: {type(error).__name__}"
        raise _refusal(part, problem) from None
    if records.shape != (part.info.num_samples,) or records.dtype != dtype:
        problem = (
            f"received {records.dtype} of shape {records.shape}, expected {dtype} of {part.info.num_samples}"
        )
        raise _refusal(part, problem)
    return records
