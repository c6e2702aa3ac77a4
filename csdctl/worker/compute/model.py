"""Models: built on the host, transferred as architecture JSON and weights, loaded on every rank.

A user's own file or code is opened on the host only (`build`). Nodes receive the architecture as JSON and the
weights as .npz, read with `allow_pickle=False`.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.flops import count_flops
from csdctl.worker.compute.keras_internals import flatten_layers, own_state
from csdctl.worker.compute.recipe import load_own_metrics, make_loss, make_metrics, make_optimizer
from csdctl.worker.compute.user_code import load_function, run_user_code
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.recipe import Recipe


def build(reference: str, arguments: dict[str, Any], recipe: Recipe, output: Path, keras: Any) -> ModelInfo:
    """Build the model `reference` and write architecture.json and weights.npz to `output`.

    Also creates the recipe's loss, optimizer and metrics, so that a wrong name is reported before anything is
    sent to a node.

    `reference` is `keras.applications:NAME`, `PATH.keras` or `PATH.py:FUNCTION`. Raises WorkerError with
    exit code 2 if the model cannot be found, built, or transferred.
    """
    make_loss(recipe, keras)
    make_optimizer(recipe, keras)
    load_own_metrics(recipe)
    keras.utils.set_random_seed(recipe.seed)
    model = _find(reference, arguments, keras)
    _check_trainable(model, reference, keras)
    make_metrics(recipe, model, keras)
    (output / "architecture.json").write_text(_to_json(model, reference, keras))
    save_weights(output / "weights.npz", model.get_weights())
    has_one_input = len(model.inputs) == 1
    return ModelInfo(
        name=reference,
        input_shape=_shape(model.inputs[0]) if has_one_input else (),
        inputs={} if has_one_input else {tensor.name: _shape(tensor) for tensor in model.inputs},
        output_shape=tuple(size or 0 for size in model.output_shape[1:]),
        num_parameters=model.count_params(),
        num_trainable=sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        output_activation=_output_activation(model),
        num_operations=count_flops(model),
        stateful_layers=find_stateful_layers(model, keras),
    )


def find_stateful_layers(model: Any, keras: Any) -> tuple[str, ...]:
    """Return names of the layers of `model` that keep state of the samples they train on.

    State that is not known to be constant counts too: layers do not declare what changes it.
    """
    found = []
    for layer in flatten_layers(model):
        is_constant = isinstance(layer, keras.layers.Normalization) or (
            isinstance(layer, keras.layers.BatchNormalization) and not layer.trainable
        )
        if getattr(layer, "stateful", False) or (own_state(layer) and not is_constant):
            found.append(f"{layer.name} ({type(layer).__name__})")
    return tuple(found)


def load(architecture: Path, weights: Path, keras: Any) -> Any:
    """Return the Keras model that `build` wrote; raises WorkerError if a file is missing or damaged."""
    try:
        model = keras.models.model_from_json(architecture.read_text())
        model.set_weights(load_weights(weights))
    except OSError as error:
        raise WorkerError(f"the model cannot be read: {error}", remedy="run `csdctl deploy` again") from None
    except Exception as error:
        raise WorkerError(
            f"the model cannot be built here: {describe(error)}",
            remedy="use layers that Keras itself provides, and the same Keras version on all machines",
            exit_code=2,
        ) from None
    return model


def save_weights(path: Path, weights: list[Any]) -> None:
    """Write arrays, in order, as an uncompressed .npz: to a temporary file, synced, renamed."""
    arrays: dict[str, Any] = {f"w{number:05d}": np.asarray(array) for number, array in enumerate(weights)}
    aside = path.with_name(f".part-{path.name}")
    with aside.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def load_weights(path: Path) -> list[Any]:
    """Return the arrays that `save_weights` wrote, in order."""
    with np.load(path, allow_pickle=False) as archive:
        return [archive[name] for name in sorted(archive.files)]


def hash_weights(model: Any) -> str:
    """Return the SHA-256, in hex, of all variables of the model: trainable ones and statistics."""
    digest = hashlib.sha256()
    for variable in model.weights:
        digest.update(np.ascontiguousarray(np.asarray(variable.value)).tobytes())
    return digest.hexdigest()


def _find(reference: str, arguments: dict[str, Any], keras: Any) -> Any:
    if reference.startswith("keras.applications:"):
        name = reference.partition(":")[2]
        function = getattr(keras.applications, name, None)
        if not callable(function):
            raise WorkerError(f"keras.applications has no model {name!r}", exit_code=2)
        return _call(reference, function, arguments)
    if reference.endswith(".keras"):
        try:
            return keras.models.load_model(reference, compile=False, safe_mode=True)
        except Exception as error:
            raise WorkerError(
                f"{reference} is not a model that can be loaded safely: {describe(error)}", exit_code=2
            ) from None
    return _call(reference, load_function(reference), arguments)


def _call(reference: str, function: Any, arguments: dict[str, Any]) -> Any:
    return run_user_code(f"{reference}({json.dumps(arguments)})", lambda: function(**arguments))


def _check_trainable(model: Any, reference: str, keras: Any) -> None:
    """Raise WorkerError, exit code 2, unless `model` is a Keras model that can be trained."""
    if not isinstance(model, keras.Model):
        raise WorkerError(
            f"{reference} returned a {type(model).__name__}, expected a Keras model", exit_code=2
        )
    if not model.built or not model.inputs or len(model.outputs) != 1:
        raise WorkerError(
            f"{reference}: expected a built model with inputs and one output",
            remedy="give the model a keras.Input of fixed shape",
            exit_code=2,
        )
    if not model.trainable_variables:
        raise WorkerError(f"{reference}: the model has no trainable variables", exit_code=2)


def _to_json(model: Any, reference: str, keras: Any) -> str:
    """Return the architecture of `model`; raises WorkerError, exit code 2, if it needs the user's code."""
    try:
        architecture: str = model.to_json()
        # Nodes do not have the user's code: layers that it registered must not be found here either.
        keras.saving.get_custom_objects().clear()
        keras.models.model_from_json(architecture)
    except Exception as error:
        raise WorkerError(
            f"{reference}: cannot be transferred as architecture JSON: {describe(error)}",
            remedy="use layers that Keras itself provides",
            exit_code=2,
        ) from None
    return architecture


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of one sample, with 0 for dimensions of variable size."""
    return tuple(size or 0 for size in tensor.shape[1:])


def _output_activation(model: Any) -> str:
    last = model.layers[-1]
    if type(last).__name__ == "Softmax":
        return "softmax"
    return str(getattr(getattr(last, "activation", None), "__name__", ""))
