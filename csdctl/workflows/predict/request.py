"""The request of one `csdctl predict`, and its output.

The request says which model, which samples, and what is kept of the outputs. The output is CSV, Parquet or
npz, written aside and renamed, so that no one sees half of it. Each row has the data set, the node where the
sample lies, and the sample's number there; no file name.
"""

import csv
import difflib
import importlib.util
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from csdctl import documents
from csdctl.documents import MAX_JSON_BYTES, load_text, write_atomically
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.fleet.requirements import explain_extra
from csdctl.job.compatibility import LOGITS
from csdctl.job.model import Job, check_keras_file, load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, VALUES, ResultRule
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.workflows.data.model import SerializedModel

CSV, PARQUET, NPZ = ".csv", ".parquet", ".npz"
ROWS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Block:
    """Results of one data set of one machine."""

    data: str
    node: str
    rows: Any
    """The number of each sample in its data set there, shape (n,), ascending."""
    fields: Mapping[str, Any]
    """Values that were asked for by name, each of shape (n, …)."""
    num_computed: int = 0
    """Rows that no earlier call had computed."""

    def __len__(self) -> int:
        return len(self.rows)


def check_output(path: Path, *, force: bool = True) -> None:
    """Raise InputError for a file that cannot be written, its suffix, or a package that is missing for it."""
    if path.suffix not in WRITERS:
        raise InputError(
            f"--output {path} ends in {path.suffix or 'nothing'!r}", remedy=f"one of {', '.join(WRITERS)}"
        )
    documents.check_output(path, "--output", force=force)
    if path.suffix == PARQUET and importlib.util.find_spec("pyarrow") is None:
        raise InputError(
            "Parquet files need the package pyarrow, which is not installed",
            remedy=f"{explain_extra('parquet')}; or choose another --output: .csv, .npz",
        )


def write_results(path: Path, blocks: Sequence[Block], names: Sequence[str]) -> None:
    """Write all rows in the order of `blocks`; `names` are those of the classes, none if unknown.

    Raises OSError.
    """
    with write_atomically(path) as file:
        WRITERS[path.suffix](file, blocks, names)


def _write_csv(file: BinaryIO, blocks: Sequence[Block], names: Sequence[str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    for number, columns in enumerate(_chunks(blocks, names)):
        if not number:
            writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    text.detach()


def _chunks(blocks: Sequence[Block], names: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """Yield columns of plain values by name, some rows at a time; vectors have a column for each number."""
    parts = ((block, start) for block in blocks for start in range(0, max(1, len(block)), ROWS_AT_ONCE))
    for block, start in parts:
        part = slice(start, start + ROWS_AT_ONCE)
        rows = block.rows[part]
        columns: dict[str, list[Any]] = {
            "data": [block.data] * len(rows),
            "node": [block.node] * len(rows),
            "row": rows.tolist(),
        }
        for name, array in block.fields.items():
            values = array[part].reshape(len(rows), math.prod(array.shape[1:]))
            lists = [[_shortest(value) for value in column] for column in values.T]
            if array.ndim == 1:
                columns[name] = lists[0]
                if names and name.rpartition(".")[2] == "class":
                    # A model may have more classes than the data.
                    named = dict(enumerate(names))
                    columns[f"{name}_name"] = [named.get(number, "") for number in lists[0]]
            else:
                columns |= {f"{name}_{number}": column for number, column in enumerate(lists)}
        yield columns


def _shortest(value: Any) -> Any:
    """Return an int, or the shortest float that float32 reads as the same."""
    return int(value) if value.dtype.kind == "i" else float(str(value))


def _write_npz(file: BinaryIO, blocks: Sequence[Block], names: Sequence[str]) -> None:
    import numpy as np

    arrays: dict[str, Any] = {
        "data": np.array([block.data for block in blocks for _ in range(len(block))], "U"),
        "node": np.array([block.node for block in blocks for _ in range(len(block))], "U"),
        "row": np.concatenate([block.rows for block in blocks]),
        "class_names": np.array(list(names), "U"),
    }
    for name in blocks[0].fields:
        arrays[name] = np.concatenate([block.fields[name] for block in blocks])
    np.savez(file, **arrays)


def _write_parquet(file: BinaryIO, blocks: Sequence[Block], names: Sequence[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    writer = None
    for columns in _chunks(blocks, names):
        table = pyarrow.table(columns) if writer is None else pyarrow.table(columns, schema=writer.schema)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()


WRITERS: dict[str, Callable[[BinaryIO, Sequence[Block], Sequence[str]], None]] = {
    CSV: _write_csv,
    PARQUET: _write_parquet,
    NPZ: _write_npz,
}


CLASSES, SCORES, EMBEDDINGS = "classes", "scores", "embeddings"
WANTED = (CLASSES, SCORES, EMBEDDINGS)
PRIVATE, PUBLIC, VALIDATION, ALL = "private", "public", "validation", "all"
DATA_SETS = (PRIVATE, PUBLIC, VALIDATION, ALL)
DEFAULT_JOB = Path("job.yaml")
LEARNING_RATE = 0.001
"""For compiling a model that has none; nothing is learnt."""


@dataclass(frozen=True)
class PredictRequest:
    """Request of one prediction; `check_request` has checked it."""

    job: Job
    """Job as written, whose data is read."""
    model: Path
    """The .keras file."""
    fleet: Fleet
    directory: Path
    output: Path
    on: tuple[str, ...]
    """PUBLIC, VALIDATION, PRIVATE: in the order of the rows."""
    want: str
    layer: str = ""

    @property
    def model_job(self) -> Job:
        """The job with the trained model in place of its own, for no training."""
        recipe = replace(
            self.job.recipe, augment="", learning_rate=self.job.recipe.learning_rate or LEARNING_RATE
        )
        code = self.job.code_roots
        model = str(self.model)
        return replace(self.job, model=model, model_args={}, code=code, recipe=recipe, noise=None)


def check_request(
    model: str,
    job: Path | None,
    load_fleet: Callable[[], Fleet],
    directory: Path,
    *,
    on: str | None,
    want: str,
    layer: str,
    output: Path,
    force: bool = False,
) -> PredictRequest:
    """Return the request; raises InputError for whatever no machine is needed to find, the fleet last."""
    if want not in WANTED:
        raise InputError(f"--want {want!r} is unknown", remedy=f"one of {', '.join(WANTED)}")
    if want == EMBEDDINGS and not layer:
        raise InputError("embeddings are the output of a layer", remedy="name it with --layer")
    if layer and want != EMBEDDINGS:
        raise InputError(
            f"--layer names what comes back as embeddings, not {want}", remedy="add --want embeddings"
        )
    check_output(output, force=force)
    file, job_path = find_model(model, job, ProjectDirectory(directory))
    loaded = load_job(job_path)
    data = choose_data(on, loaded)
    return PredictRequest(loaded, file, load_fleet(), directory, output, data, want, layer)


def find_model(model: str, job: Path | None, project: ProjectDirectory) -> tuple[Path, Path]:
    """Return the .keras file and the job file; `model` is such a file, or a run. Raises InputError."""
    if model.endswith(".keras"):
        path = (project.root / Path(model).expanduser()).resolve()
        if not os.path.isfile(path):
            raise InputError(
                f"model file {path} does not exist", remedy="name a .keras file that exists, or a run"
            )
        check_keras_file(path)
        return path, job or DEFAULT_JOB
    run = project.find_run(model)
    if not run.model.is_file():
        raise InputError(
            f"run {run.run_id} has no model.keras: it has not come to its end",
            remedy=f"continue it with `csdctl train --resume {run.run_id}`, or name another run",
        )
    described = run.load_manifest().get("job")
    written = described.get("path") if isinstance(described, dict) else None
    of_run = project.root / written if isinstance(written, str) else DEFAULT_JOB
    return run.model.resolve(), job or of_run


def choose_data(on: str | None, job: Job) -> tuple[str, ...]:
    """Return the data sets to predict, in the order of the rows; default: private, else public."""
    if on not in (None, *DATA_SETS):
        raise InputError(f"--on {on!r} is unknown", remedy=f"one of {', '.join(DATA_SETS)}")
    present = {PUBLIC: True, VALIDATION: bool(job.validation_path), PRIVATE: bool(job.private_path)}
    wanted: Sequence[str] = (PUBLIC, VALIDATION, PRIVATE)
    if on is None:
        wanted = [PRIVATE if job.private_path else PUBLIC]
    elif on != ALL:
        wanted = [on]
        if not present[on]:
            raise InputError(
                f"{job.path} has no {on} data", remedy=f"add data.{on} to it, or choose other data with --on"
            )
    return tuple(name for name in wanted if present[name])


MAX_SHOWN = 5


def build_rules(info: ModelInfo, want: str) -> tuple[ResultRule, ...]:
    """Return what is kept of each output; raises InputError where there is no class to keep."""
    if want == EMBEDDINGS:
        return (ResultRule("", VALUES),)
    if want != CLASSES:
        return tuple(ResultRule(output.name, VALUES) for output in info.outputs)
    return tuple(_rule_of_classes(output, info) for output in info.outputs)


def _rule_of_classes(output: OutputInfo, info: ModelInfo) -> ResultRule:
    kind = output.activation if output.activation in (SOFTMAX, SIGMOID) else ""
    kind = kind or LOGITS.get(output.loss.replace("_", "").lower(), VALUES)
    if kind != VALUES and output.is_known and len(output.shape) > 1:
        size = "×".join(str(size) if size else "any" for size in output.shape)
        raise InputError(
            f"{output.name or info.name} has outputs of shape {size}, not one class for each sample",
            remedy="ask for all of them with --want scores",
        )
    return ResultRule(output.name, kind, output.from_logits and kind != VALUES)


def check_layer(layer: str, model: SerializedModel) -> None:
    """Raise InputError unless the model's graph has this layer; the nodes are not asked."""
    architecture = json.loads(load_text(model.architecture.source, max_bytes=MAX_JSON_BYTES))
    names = [layer["config"]["name"] for layer in architecture.get("config", {}).get("layers", [])]
    if layer in names:
        return
    near = difflib.get_close_matches(layer, names, MAX_SHOWN) or names[-MAX_SHOWN:]
    raise InputError(
        f"{model.info.name} has no layer {layer!r} in its graph",
        remedy=f"one of its layers, such as {', '.join(near)}"
        if near
        else "only models with a graph of layers, functional or sequential, have embeddings",
    )
