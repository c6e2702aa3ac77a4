"""Models for tests of the worker, built in the test process, which loads TensorFlow once."""

from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.compile import Step
from csdctl.worker.compute.model import save_weights, with_settings
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.protocol.recipe import Recipe


def keras() -> Any:
    return load_backend()[1]


def make_step(model: Any, recipe: Recipe, samples: Any, labels: Any, **options: Any) -> Step:
    """Return the step of `model`, compiled here, for samples and labels of this form."""
    compile_model(model, recipe)
    return Step(model, recipe, (samples[:0], labels[:0]), **options)


def as_records(fields: dict[str, Any], weights: Any = None) -> np.ndarray[Any, Any]:
    """Return arrays, such as labels of several outputs, as prepared data has them."""
    arrays = fields if weights is None else {**fields, "sample_weight": weights}
    types = {name: "i4" if array.dtype.kind == "i" else "f4" for name, array in arrays.items()}
    kinds = [(name, types[name], array.shape[1:]) for name, array in arrays.items()]
    records = np.empty(len(next(iter(arrays.values()))), kinds)
    for name, array in arrays.items():
        records[name] = array
    return records


def carry(model: Any, directory: Path, recipe: Recipe | None = None) -> tuple[str, str]:
    """Write `model`, compiled, as nodes receive it; return the paths of architecture and weights."""
    architecture, weights = directory / "architecture.json", directory / "weights.npz"
    compile_model(model, recipe or Recipe(learning_rate=0.01))
    architecture.write_text(with_settings(model.to_json()))
    save_weights(weights, model.get_weights())
    return str(architecture), str(weights)
