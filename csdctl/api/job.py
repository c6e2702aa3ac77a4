"""A job from Python: written to a directory as a user would write it, and read from there."""

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from csdctl.documents import make_directory, save_text, write_atomically
from csdctl.errors import InputError
from csdctl.job import model as files
from csdctl.worker.protocol.datasets import INPUT, OUTPUT, name_of_position

LOADER = '''"""Reads the arrays of a job that was made in Python."""

import numpy as np


def _part(arrays, kind):
    names = [name for name in arrays.files if name == kind or name.startswith(kind + "/")]
    if names == [kind]:
        return arrays[kind]
    return {name.partition("/")[2]: arrays[name] for name in names}


def load(path):
    with np.load(path, allow_pickle=False) as arrays:
        parts = [_part(arrays, kind) for kind in ("x", "y", "w")]
    parts = [part for part in parts if len(part)]
    return tuple(parts) if len(parts) > 1 else parts[0]
'''
KINDS = ("x", "y", "w")
POSITIONS = {"x": INPUT, "y": OUTPUT}


@dataclass(frozen=True)
class Job:
    """What to train: the job of a job.yaml, `Job("job.yaml")`. Raises InputError when it cannot be used."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        self.load()

    @classmethod
    def from_model(
        cls,
        model: Any,
        data: Any,
        *,
        validation: Any = None,
        directory: str | Path = "csdctl-job",
        code: Sequence[str | Path] = (),
        input_range: tuple[float, float] | None = None,
        **recipe: Any,
    ) -> Self:
        """Write model, data and job.yaml to `directory`, and return the job.

        `model`: a Keras model; loss, optimizer and metrics of its compile() are used, and its train_step. The
        arguments of its own constructor and compile() must be attributes with the same names. `data` and
        `validation`: x, (x, y) or (x, y, sample_weight), each an array, or a dict, list or tuple of arrays
        for several inputs or outputs; an iterable of such batches, as a tf.data.Dataset; or the path of data
        as job.yaml takes it. `code`: files and packages with the model's own layers, losses and metrics.
        `input_range`: scales uint8 arrays; None leaves them as they are. `recipe`: as in job.yaml, such as
        epochs=5 or early_stopping=csdctl.EarlyStopping(patience=3); without it, one epoch. The command line
        takes the job too: `csdctl train csdctl-job/job.yaml`.

        Raises InputError when the job cannot be used.
        """
        recipe = {"epochs": 1, **{key: _plain(value, f"recipe.{key}") for key, value in recipe.items()}}
        path = Path(directory)
        make_directory(path)
        save = getattr(model, "save", None)
        if not callable(save):
            raise InputError(f"received a {type(model).__name__} as model, expected a Keras model")
        with _revivable(model):
            save(path / "model.keras")
        entries = {"public": _write_data(path, "train", data)}
        if validation is not None:
            entries["validation"] = _write_data(path, "validation", validation)
        scaling = list(input_range) if input_range else None
        content: dict[str, Any] = {
            "model": "model.keras",
            "data": {**entries, "input_range": scaling},
            "recipe": recipe,
        }
        if code:
            content["code"] = [os.path.relpath(Path(file), path) for file in code]
        save_text(path / "job.yaml", yaml.safe_dump(content, sort_keys=False))
        return cls(path / "job.yaml")

    def load(self) -> files.Job:
        """Return the job as the workflows take it; raises InputError."""
        return files.load_job(self.path)


@contextmanager
def _revivable(model: Any) -> Iterator[None]:
    """Let `save` write what the constructor and the compile() of the model's own class were called with.

    Keras knows neither of a class without get_config() and get_compile_config(). Raises InputError for an
    argument that is no attribute of the model.
    """
    kind, base = type(model), getattr(sys.modules.get("keras"), "Model", None)
    kept: dict[str, Any] = {}
    for method, getter in (("__init__", "get_config"), ("compile", "get_compile_config")):
        if base is None or not isinstance(model, base) or getattr(kind, method) is getattr(base, method):
            continue
        if getattr(kind, getter) is getattr(base, getter):
            of_layers = {"name": model.name, "trainable": model.trainable, "dtype": model.dtype_policy}
            known = model.get_compile_config() if method == "compile" else of_layers
            kept[getter] = _arguments(model, method, known)
    for getter, arguments in kept.items():
        setattr(model, getter, lambda arguments=arguments: arguments)
    try:
        yield
    finally:
        for getter in kept:
            delattr(model, getter)


def _arguments(model: Any, method: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method: attributes of the model, else those that Keras has `known`."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(getattr(model, method)).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            found |= {key: value for key, value in known.items() if key not in found}
        elif name in known and (not hasattr(model, name) or "metrics" in name):
            found[name] = known[name]
        elif hasattr(model, name):
            found[name] = getattr(model, name)
        else:
            raise InputError(
                f"{method}() of {type(model).__name__} takes {name}, which is not an attribute of the model",
                remedy=f"keep it: self.{name} = {name}; or write job.yaml, with `model: FILE.py:FUNCTION`",
            )
    return found


def _plain(value: Any, name: str) -> Any:
    """Return a value of the recipe as YAML can hold it; raises InputError for objects."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"received a {type(value).__name__} as {name}, expected a value of job.yaml",
        remedy="pass loss, optimizer and metrics to model.compile(), or by their Keras names",
    )


def _write_data(directory: Path, name: str, data: Any) -> dict[str, str]:
    """Write arrays to NAME.npz; return their entry in job.yaml."""
    if isinstance(data, str | Path):
        return {"path": str(Path(data).resolve())}
    arrays = _name_arrays(_collect(data), name)
    with write_atomically(directory / f"{name}.npz") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    save_text(directory / "data.py", LOADER)
    return {"path": f"{name}.npz", "function": "data.py:load"}


def _collect(data: Any) -> tuple[Any, ...]:
    """Return (x,), (x, y) or (x, y, sample_weight) of all samples; batches are joined."""
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return tuple(data)
    if isinstance(data, Mapping) or hasattr(data, "shape"):
        return (data,)
    if not isinstance(data, Iterable):
        raise InputError(
            f"received a {type(data).__name__} as data, expected x, (x, y), (x, y, sample_weight), batches "
            "of them, or a path"
        )
    cardinality = getattr(data, "cardinality", None)  # of a tf.data.Dataset; -1: infinite
    if cardinality is not None and int(cardinality()) == -1:
        raise InputError("the data set is infinite", remedy="make it finite: dataset.take(number)")
    batches = [tuple(batch) if isinstance(batch, tuple | list) else (batch,) for batch in data]
    if not batches or len({len(batch) for batch in batches}) != 1 or len(batches[0]) not in (1, 2, 3):
        raise InputError("the data yields no batches of x, (x, y) or (x, y, sample_weight)")
    return tuple(_join([batch[number] for batch in batches]) for number in range(len(batches[0])))


def _join(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _join([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        return [_join([part[number] for part in parts]) for number in range(len(first))]
    arrays = [np.asarray(part) for part in parts]
    return np.concatenate(arrays) if arrays[0].ndim else np.stack(arrays)


def _name_arrays(parts: tuple[Any, ...], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of x, y and w by name; raises InputError unless they are numbers."""
    named: dict[str, np.ndarray[Any, Any]] = {}
    for kind, part in zip(KINDS, parts, strict=False):
        if isinstance(part, Mapping):
            named |= {f"{kind}/{key}": np.asarray(value) for key, value in part.items()}
        elif isinstance(part, tuple | list) and all(hasattr(value, "shape") for value in part):
            position = POSITIONS.get(kind, kind)
            named |= {
                f"{kind}/{name_of_position(position, number)}": np.asarray(one)
                for number, one in enumerate(part)
            }
        elif part is not None:
            named[kind] = np.asarray(part)
    lengths = {key: len(array) if array.ndim else 0 for key, array in named.items()}
    wrong = [key for key, array in named.items() if array.dtype.kind not in "buif"]
    if wrong or len(set(lengths.values())) != 1:
        found = ", ".join(f"{key} {array.dtype} {array.shape}" for key, array in named.items())
        raise InputError(f"the {name} data is not numbers with one row per sample: {found}")
    return named
