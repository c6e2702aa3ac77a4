"""`predict`: run a trained model over samples where they lie, and bring back what was asked for.

Each machine keeps its results by content, and continues them after an interruption. What it sends are rows
of numbers: of private samples neither the samples nor their names.
"""

import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from csdctl.errors import CsdctlError, PartialError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.names import format_node_names
from csdctl.shipping.deliver import Delivery
from csdctl.shipping.worker_calls import call_worker, fetch_results
from csdctl.transport.many import Outcome, errors_of, run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.worker.protocol.features import RESULT_STORE, VALUES, Extracted, ExtractSpec, ResultRule, SendSpec
from csdctl.worker.protocol.run_spec import Prefix
from csdctl.workflows.data.deploy import common_files, deploy_files
from csdctl.workflows.data.prepare import (
    OnPrepareProgress,
    PreparationObserver,
    Prepared,
    check_info,
    prepare_in,
)
from csdctl.workflows.data.prepared_record import load_prepared
from csdctl.workflows.predict.division import Part, divide_samples, on_host
from csdctl.workflows.predict.request import CLASSES, EMBEDDINGS, PRIVATE, PUBLIC, SCORES, PredictRequest
from csdctl.workflows.predict.rules import build_rules, check_layer
from csdctl.workflows.predict.writing import Block, write_results
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


class PredictObserver(PreparationObserver, Protocol):
    """Shows one `csdctl predict`."""

    def on_delivery(self, node: str, delivery: Delivery, /) -> None:
        """Files have reached `node`."""


@dataclass
class PredictResult:
    """What was predicted, and what is missing."""

    output: Path
    num_rows: int = 0
    num_computed: int = 0
    """Rows that no earlier call had computed."""
    num_rows_of: dict[str, int] = field(default_factory=dict)
    """By machine that computed them."""
    missing: dict[str, CsdctlError] = field(default_factory=dict)
    """Nodes whose rows are missing, and why."""
    num_missing: dict[str, int] = field(default_factory=dict)
    """By node, where the number is known."""
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


def predict(request: PredictRequest, observer: PredictObserver) -> PredictResult:
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
        parts = divide_samples(request, prepared, space, num_private, observer.say)
        with ExitStack() as stack:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(".predict", dir=space.project.state))
            )
            prediction = _Prediction(request, prepared, space, rules, directory, observer)
            failed = prediction.run(parts)
            result = prediction.count()
            if PRIVATE in request.on:
                result.missing = absent | failed
                result.num_missing = {
                    name: num_private[name] for name in result.missing if name in num_private
                }
            if result.missing and not result.num_rows:
                outcomes = {name: Outcome[None](name, error=error) for name, error in result.missing.items()}
                values_or_raise(outcomes, _DOING)
            write_results(request.output, prediction.blocks(), list(prepared.public.class_counts))
            result.elapsed_s = time.monotonic() - began
            return result


class _Prediction:
    """The predictions of one call."""

    def __init__(
        self,
        request: PredictRequest,
        prepared: Prepared,
        space: Workspace,
        rules: tuple[ResultRule, ...],
        directory: Path,
        observer: PredictObserver,
    ) -> None:
        self._request, self._prepared, self._space = request, prepared, space
        self._rules, self._directory, self._observer = rules, directory, observer
        self._found: dict[Part, Any] = {}
        """The records of each part that is done, shape (n,)."""
        self._num_computed: dict[Part, int] = {}

    def run(self, parts: list[Part]) -> dict[str, CsdctlError]:
        """Predict all parts; the host takes over public ones. Return the errors of the nodes."""
        by_machine: dict[str, list[Part]] = {}
        for part in parts:
            by_machine.setdefault(part.machine, []).append(part)
        files = {
            name: [*common_files(self._prepared), *(file for part in own for file in part.files)]
            for name, own in by_machine.items()
        }
        failed = self._run_all(by_machine, files)
        host = default_runtime(HOST_NAME, self._space.fleet, self._space.facts)
        left = [
            on_host(part, self._prepared, self._request.job, host)
            for part in parts
            if part.data == PUBLIC and part not in self._found
        ]
        if HOST_NAME in failed:
            raise failed[HOST_NAME]
        if left:
            names = format_node_names(failed)
            self._observer.say(f"{names} failed: the host predicts the public samples of {names}")
            for error in self._run_all({HOST_NAME: left}, {}).values():
                raise error
        missing = {part.machine for part in parts if part.data == PRIVATE and part not in self._found}
        return {name: error for name, error in failed.items() if name in missing}

    def count(self) -> PredictResult:
        """Return the numbers of rows."""
        by_machine: Counter[str] = Counter()
        for part in self._found:
            by_machine[part.machine] += part.num_samples
        return PredictResult(
            self._request.output,
            by_machine.total(),
            sum(self._num_computed[part] for part in self._found),
            {name: by_machine[name] for name in self._space.fleet.machines if name in by_machine},
        )

    def blocks(self) -> list[Block]:
        """Return the results of each data set of each machine, in the order of the rows."""
        import numpy as np

        together: dict[tuple[str, str], list[Part]] = {}
        for part in self._found:
            together.setdefault((part.data, part.owner), []).append(part)
        order = {name: number for number, name in enumerate(self._space.fleet.machines)}
        blocks = []
        for data, owner in sorted(together, key=lambda key: (order[key[1]], self._request.on.index(key[0]))):
            parts = together[data, owner]
            rows = np.concatenate(
                [part.rows(self._prepared, self._request.job.recipe.seed) for part in parts]
            )
            records = [self._found[part] for part in parts]
            if len(parts) > 1:
                by_row = np.argsort(rows, kind="stable")
                rows, records = rows[by_row], [np.concatenate(records)[by_row]]
            fields = {name: records[0][name] for name in records[0].dtype.names}
            blocks.append(Block(data, owner, rows, fields))
        return blocks

    def _run_all(
        self, by_machine: Mapping[str, list[Part]], files: Mapping[str, Any]
    ) -> dict[str, CsdctlError]:
        sessions = {name: self._space.sessions[name] for name in by_machine}
        labels = [part.label for own in by_machine.values() for part in own]
        with self._observer.preparing(_DOING, labels) as on_progress:

            def on_machine(name: str) -> None:
                if name in files and name != HOST_NAME:
                    deploy_files({name: files[name]}, self._space.fleet, sessions, self._observer.on_delivery)
                for part in by_machine[name]:
                    self._predict(part, on_progress)

            outcomes: Mapping[str, Outcome[None]] = run_on_all(
                {name: name for name in by_machine}, on_machine
            )
        failed = errors_of(outcomes)
        if len(failed) == len(by_machine):
            values_or_raise(outcomes, _DOING)
        return failed

    def _predict(self, part: Part, on_progress: OnPrepareProgress) -> None:
        request, prepared, space = self._request, self._prepared, self._space
        session, python = space.sessions[part.machine], space.fleet.python_of(part.machine)
        model = prepared.model
        whole_model = Prefix(
            model.architecture.path, model.weights.path, prepared.recipe.input_range, code=model.user_code
        )
        spec = ExtractSpec(part.source, RESULT_STORE, whole_model, part.runtime, self._rules, request.layer)
        first_done: int | None = None

        def note(progress: PrepareProgress) -> None:
            nonlocal first_done
            if progress.num_total and first_done is None:
                first_done = progress.num_done
            on_progress(part.label, progress)

        extracted = call_worker(
            session, python, prepared.worker.path, "extract", spec, Extracted, note, doing=_DOING
        )
        check_parts(extracted, 1, part.machine, _DOING)
        (info,) = extracted.parts
        check_info(info, part.machine, _DOING, may_be_empty=True)
        dtype = self._check_dtype(info, part)
        target = self._directory / f"{part.data}-{part.machine}-{part.start}.npy"
        num_bytes = part.num_samples * dtype.itemsize + MAX_HEADER_BYTES
        traffic = TRAFFIC[request.want] if part.data == PRIVATE else TrafficClass.PUBLIC
        with target.open("wb") as file:
            fetch_results(
                session,
                python,
                prepared.worker.path,
                SendSpec(Path(info.path).name, info.images_sha256, num_bytes),
                file,
                traffic,
                doing=_DOING,
            )
        self._found[part] = _load(target, part, dtype)
        self._num_computed[part] = 0 if first_done is None else part.num_samples - first_done

    def _check_dtype(self, info: DatasetInfo, part: Part) -> Any:
        """Return the type of a row; raises RemoteCommandError if it is not what was asked for."""
        import numpy as np

        expected = {
            name: ("float32" if name.endswith(("value", "probability")) else "int32")
            for rule in self._rules
            for name in rule.fields
        }
        found = info.inputs
        is_as_asked = {name: dtype for name, (dtype, _) in found.items()} == expected
        are_scalars = all(
            not found[name][1]
            for rule in self._rules
            if rule.kind != VALUES
            for name in rule.fields
            if name in found
        )
        if info.num_samples != part.num_samples or info.sample_shape or not (is_as_asked and are_scalars):
            raise _refusal(
                part,
                f"received {info.num_samples} rows of {', '.join(found)}, "
                f"expected {part.num_samples} of {', '.join(expected)}",
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
        records = np.load(path, mmap_mode="r" if part.num_samples else None, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python, and passes on all of its errors
        problem = f"received results that cannot be read: {type(error).__name__}"
        raise _refusal(part, problem) from None
    if records.shape != (part.num_samples,) or records.dtype != dtype:
        problem = f"received {records.dtype} of shape {records.shape}, expected {dtype} of {part.num_samples}"
        raise _refusal(part, problem)
    return records
