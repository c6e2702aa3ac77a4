"""Check that model, data and loss of a job are compatible, before anything is sent or started."""

import json
from collections.abc import Mapping

from csdctl.errors import InputError
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.recipe import Noise, Recipe

INTEGER_LABEL_LOSSES = ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")


def check_compatibility(recipe: Recipe, model: ModelInfo, datasets: Mapping[str, DatasetInfo | None]) -> None:
    """Raise InputError when the model cannot take the samples or its output does not match the labels.

    `datasets` maps 'public', 'validation' or a node's name (its private data) to the prepared data.
    """
    for name, data in datasets.items():
        if data is None:
            continue
        which = f"{name} data" if name in ("public", "validation") else f"private data of {name}"
        _check_input(model, data, which)
        _check_output(recipe, model, data, which)
    _check_types(datasets)
    if recipe.loss in INTEGER_LABEL_LOSSES:
        _check_logits(recipe, model)


def check_noise(noise: Noise, model: ModelInfo, private: Mapping[str, DatasetInfo]) -> None:
    """Raise InputError when noise on gradients cannot protect all private samples.

    Statistics of layers would reveal samples without noise, and a large delta permits publishing a sample.
    `private` maps each node's name to its private data.
    """
    if model.stateful_layers:
        raise InputError(
            f"model {model.name} stores statistics of its samples, which data.private.noise does not cover: "
            f"{_list_names(model.stateful_layers)}",
            remedy="use LayerNormalization or GroupNormalization, freeze the layers (trainable=False), "
            "or train without data.private.noise",
        )
    for node, data in private.items():
        if noise.delta * data.num_samples >= 1:
            raise InputError(
                f"data.private.noise.delta is {noise.delta:g}, but {node} has {data.num_samples:,} private "
                "samples: that would permit publishing one of them",
                remedy=f"expected far less than 1 / {data.num_samples}, for example "
                f"{0.01 / data.num_samples:.0e}",
            )


def _list_names(names: tuple[str, ...], at_most: int = 4) -> str:
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


def _check_types(datasets: Mapping[str, DatasetInfo | None]) -> None:
    """Require the same type for all data sets: uint8 pixels are scaled and floats are not."""
    types = {name: data.dtype for name, data in datasets.items() if data}
    if len(set(types.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in types.items())
        raise InputError(
            f"the data sets have samples of different types: {listed}",
            remedy="store all of them with the same type",
        )


def _check_logits(recipe: Recipe, model: ModelInfo) -> None:
    """Check the last activation, if it is known, against `from_logits`."""
    wrong = "softmax" if recipe.from_logits else "linear"
    if model.output_activation == wrong:
        current, other = str(recipe.from_logits).lower(), str(not recipe.from_logits).lower()
        raise InputError(
            f"model {model.name} ends in a {wrong} layer, but recipe.from_logits is {current}",
            remedy=f"set recipe.from_logits: {other}, or change the model's last layer",
        )


def _check_input(model: ModelInfo, data: DatasetInfo, which: str) -> None:
    if model.inputs or data.dtype.startswith("["):
        _check_inputs(model, data, which)
        return
    if not _matches_shape(model.input_shape, data.sample_shape):
        raise InputError(
            f"model {model.name} takes samples of shape {_shape(model.input_shape)}, "
            f"the {which} has {_shape(data.sample_shape)}",
            remedy="change the model's input or the data",
        )


def _matches_shape(expected: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether an input of shape `expected` takes samples of shape `shape`; 0 is any size."""
    return len(expected) == len(shape) and all(a in (0, b) for a, b in zip(expected, shape, strict=True))


def _check_inputs(model: ModelInfo, data: DatasetInfo, which: str) -> None:
    """Check that the data has an array for each of several inputs, by name."""
    fields = json.loads(data.dtype) if data.dtype.startswith("[") else []
    actual = {name: tuple(shape) for name, _, shape in fields}
    expected = {name: tuple(shape) for name, shape in model.inputs.items()}
    if not expected or actual.keys() != expected.keys():
        raise InputError(
            f"model {model.name} takes {', '.join(sorted(expected)) or 'one input'}, "
            f"the {which} has {', '.join(sorted(actual)) or 'one array'}",
            remedy="give the arrays of the .npz file the names of the model's inputs",
        )
    for name, shape in expected.items():
        if not _matches_shape(shape, actual[name]):
            raise InputError(
                f"input {name} of model {model.name} takes samples of shape {_shape(shape)}, "
                f"the {which} has {_shape(actual[name])}",
                remedy="change the model's input or the data",
            )


def _check_output(recipe: Recipe, model: ModelInfo, data: DatasetInfo, which: str) -> None:
    if recipe.loss in INTEGER_LABEL_LOSSES:
        if not data.label_shape and data.max_label < 0:
            raise InputError(
                f"loss {recipe.loss} needs integer labels from 0, the {which} has other labels",
                remedy="number the classes from 0, or choose another recipe.loss",
            )
        if data.label_shape:
            raise InputError(
                f"loss {recipe.loss} needs one integer label per sample, "
                f"the {which} has labels of shape {_shape(data.label_shape)}",
                remedy="use recipe.loss: categorical_crossentropy for one-hot labels",
            )
        if len(model.output_shape) != 1 or model.output_shape[0] <= data.max_label:
            raise InputError(
                f"model {model.name} has {_shape(model.output_shape)} outputs, "
                f"the {which} has labels up to {data.max_label}",
                remedy=f"give the model at least {data.max_label + 1} outputs",
            )
    elif tuple(model.output_shape) != tuple(data.label_shape or (1,)):
        raise InputError(
            f"model {model.name} has outputs of shape {_shape(model.output_shape)}, "
            f"the {which} has labels of shape {_shape(data.label_shape)}",
            remedy="change the model's last layer, the labels or recipe.loss",
        )


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(str(size) if size else "any" for size in shape) or "1"
