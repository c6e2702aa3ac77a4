"""Models for tests of the worker, built in the test process, which loads TensorFlow once."""

from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import DEFAULT, load_backend
from csdctl.worker.compute.compile import assign, make_compiler, trace
from csdctl.worker.compute.model import save_weights, with_settings
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.compute.user_code import load_augmentation
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.step import StepEngine
from csdctl.worker.engine.tensorflow_c import GraphSession
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import Runtime


class Step(StepEngine):
    """A step of a model in this process, whose operations may call Python."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        example: tuple[Array, Array],
        *,
        noise: Noise | None = None,
        runtime: Runtime = DEFAULT,
        has_validation: bool = False,
        **options: Any,
    ) -> None:
        """`model`: compiled; `example` as of `make_compiler`; `options` as of StepEngine."""
        self.compiler = make_compiler(
            model, recipe, example, has_noise=noise is not None, has_validation=has_validation
        )
        info, builder = trace(self.compiler)
        super().__init__(
            info,
            GraphSession(builder.optimize(has_python=True), runtime),
            self.compiler.values,
            recipe.seed,
            noise=noise,
            augmentation=load_augmentation(recipe.augment, recipe.seed, None),
            **options,
        )
        for rate, factor in zip(self.compiler.rates, info.rate_factors, strict=True):
            self.rate = np.asarray(rate.value, np.float32) / np.float32(factor)

    @property
    def model(self) -> Any:
        """The model, with the weights of this step and the state of its optimizer."""
        for variable, value in zip(self.compiler.variables, self.values, strict=True):
            assign(variable, value)
        return self.compiler.model


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
