"""The trained model of a run: from its .keras file, or its weights in a model built by the job."""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from csdctl.errors import InputError
from csdctl.runs.directory import RunDirectory
from csdctl.worker.protocol.datasets import as_inputs
from csdctl.worker.protocol.json_codec import ProtocolError, from_dict
from csdctl.worker.protocol.model_info import BUILDER, BuildSpec


def load_model(path: Path, run: RunDirectory, custom_objects: dict[str, Any] | None, remedy: str) -> Any:
    """Return the model of `run` in `path`, a .keras file, or in the .weights.h5 file in its place.

    Raises InputError, with `remedy` when there is neither, or when the model cannot be built again.
    """
    weights = path.with_suffix(".weights.h5")
    if not path.exists() and not weights.exists():
        raise InputError(f"run {run.run_id} has no {path.name}", remedy=remedy)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras

    if path.exists():
        return keras.models.load_model(path, custom_objects=custom_objects)
    try:
        spec = _find_builder(run)
        model = _build(spec)
        model.load_weights(weights)
    except Exception as error:  # of any kind: the user's code
        raise InputError(
            f"run {run.run_id} has only weights, and its model cannot be built again: {error}",
            remedy=f"build the model as the job did, and call model.load_weights({str(weights)!r})",
        ) from error
    return model


def _find_builder(run: RunDirectory) -> BuildSpec:
    """Return how the ranks built the model; raises OSError, ValueError or ProtocolError."""
    project = run.path.parents[2]
    architecture = json.loads(run.spec.read_text())["architecture"]
    content = json.loads((project / architecture).read_text())
    if BUILDER not in content:
        raise ProtocolError("no function built it")
    spec: BuildSpec = from_dict(BuildSpec, content[BUILDER])
    return spec


def _build(spec: BuildSpec) -> Any:
    """Return the model of the user's function, with all its weights; raises whatever that raises."""
    file, _, name = spec.reference.rpartition(":")
    model = getattr(_import_file(Path(file)), name)(**spec.arguments)
    if spec.sample_shapes:  # a subclassed model has its weights once it is called
        samples = {name: np.zeros((2, *shape), dtype) for name, (dtype, shape) in spec.sample_shapes.items()}
        model(as_inputs(samples))
    return model


def _import_file(path: Path) -> Any:
    """Import the user's file with the modules beside it; once, so that its classes stay the same."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or ".").resolve() == path.resolve():
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    if loaded is None:
        return importlib.import_module(path.stem)
    return SimpleNamespace(**runpy.run_path(str(path)))  # beside a library of that name
