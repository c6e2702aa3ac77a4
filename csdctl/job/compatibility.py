"""Check that model, data and losses of a job are compatible, before anything is sent or started."""

from collections.abc import Mapping, Sequence

from csdctl.errors import InputError
from csdctl.worker.protocol import datasets as protocol
from csdctl.worker.protocol.datasets import DatasetInfo, Parts, equals, list_names, takes
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.worker.protocol.recipe import Noise

_SPARSE = "sparsecategoricalcrossentropy"
LOGITS = {
    "sparsecategoricalcrossentropy": "softmax",
    "categoricalcrossentropy": "softmax",
    "categoricalfocalcrossentropy": "softmax",
    "binarycrossentropy": "sigmoid",
    "binaryfocalcrossentropy": "sigmoid",
}
"""Losses that take probabilities or logits, and the activation that gives probabilities."""
_REGRESSION = {
    *("meansquarederror", "meanabsoluteerror", "meanabsolutepercentageerror", "meansquaredlogarithmicerror"),
    *("mse", "mae", "mape", "msle", "huber", "logcosh", "poisson"),
}
_SAME_SHAPE = {
    *LOGITS.keys() - {_SPARSE},
    *_REGRESSION,
    *("kld", "bce", "kldivergence", "hinge", "squaredhinge", "categoricalhinge"),
}
"""Losses whose labels have the shape of the output; all others of the user's are not judged by shape."""

Shape = tuple[int, ...]


def check_compatibility(
    model: ModelInfo, datasets: Mapping[str, DatasetInfo | None], *, needs_labels: bool = True
) -> None:
    """Raise InputError when the model cannot take the samples or, if it needs labels, its outputs do not fit.

    `datasets` maps 'public', 'validation' or a node's name (its private data) to the prepared data. Neither a
    model whose outputs are not known, a subclass, is judged, nor one whose own train_step takes the batch.
    """
    outputs = model.outputs
    is_judged = all(output.is_known for output in outputs) and not model.has_own_step
    by_text = {
        f"{name} data" if name in ("public", "validation") else f"private data of {name}": data
        for name, data in datasets.items()
        if data
    }
    for text, data in by_text.items() if is_judged else ():
        _check_inputs(model, data, text)
        for output, field in _match(model, outputs, data, text) if needs_labels else ():
            if output.loss:
                _check_labels(model, output, data, field, text)
    _check_alike("samples", {text: data.inputs for text, data in by_text.items()})
    if not needs_labels:
        return
    _check_alike("labels", {text: data.labels for text, data in by_text.items() if data.label_dtype})
    weightless = [text for text, data in by_text.items() if data.max_values.get(protocol.SAMPLE_WEIGHT) == 0]
    evaluated = "validation data"
    if evaluated in weightless or {*by_text} - {evaluated} <= {*weightless}:
        problem = f"all weights are 0 in the {' and the '.join(weightless)}"
        raise InputError(problem, remedy="give some of the samples a weight, or leave out the weights")
    for output in outputs if not model.has_own_step else ():
        _check_logits(model, output)


def inputs_of(model: ModelInfo) -> dict[str, Shape]:
    """Return the shape of each of the model's inputs by name, '' for the only one. {} if they are unknown."""
    is_known = list(model.inputs) != [""] or all(output.is_known for output in model.outputs)
    return model.inputs if is_known else {}


def is_regression(model: ModelInfo) -> bool:
    """Return whether the losses of all outputs take values, not classes."""
    losses = {plain_name(output.loss) for output in model.outputs}
    return bool(losses) and losses <= _REGRESSION


def check_noise(noise: Noise, model: ModelInfo, private: Mapping[str, DatasetInfo]) -> None:
    """Raise InputError when noise on gradients cannot protect all private samples.

    Statistics of layers would reveal samples without noise, and a large delta permits publishing a sample.
    `private` maps each node's name to its private data.
    """
    if model.stateful_layers:
        raise InputError(
            f"model {model.name} stores statistics of its samples, which data.private.noise does not cover: "
            f"{list_names(model.stateful_layers, 4)}",
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


def _check_alike(what: str, parts: Mapping[str, Parts]) -> None:
    """Require the same shapes and types of all data sets: a batch may have samples of several."""
    if len({str(sorted(fields.items())) for fields in parts.values()}) > 1:
        listed = ", ".join(f"{name} {describe_arrays(fields)}" for name, fields in parts.items())
        raise InputError(
            f"the data sets have {what} of different types: {listed}",
            remedy="store all of them with the same shape and type, and the same names",
        )


def describe_arrays(parts: Parts) -> str:
    """Return in words: names, types and shapes of the arrays of a sample."""
    return " and ".join(
        f"{name} {dtype} {show_shape(shape) if shape else ''}".strip()
        for name, (dtype, shape) in parts.items()
    )


def _part(model: ModelInfo, kind: str, name: str) -> str:
    """Return an input or output as messages name it. The only one is the model itself."""
    return f"{kind} {name} of model {model.name}" if name else f"model {model.name}"


def _check_logits(model: ModelInfo, output: OutputInfo) -> None:
    probabilities = LOGITS.get(plain_name(output.loss))
    wrong = probabilities if output.from_logits else "linear"
    if probabilities and output.activation == wrong:
        current, opposite = str(output.from_logits).lower(), str(not output.from_logits).lower()
        name = _part(model, protocol.OUTPUT, output.name)
        raise InputError(
            f"{name} ends in a {wrong} layer, but recipe.from_logits is {current}",
            remedy=f"set recipe.from_logits: {opposite} (or from_logits of the loss in compile()), "
            "or change the model's last layer",
        )


def plain_name(loss: str) -> str:
    """Return the name of a loss as LOGITS has it, in either of Keras' spellings."""
    return loss.replace("_", "").lower()


def _check_inputs(model: ModelInfo, data: DatasetInfo, which: str) -> None:
    """Check that the data has an array for each input: by name, or in order if the data names none."""
    expected, parts = inputs_of(model), data.inputs
    arrays = list(expected)
    if expected.keys() != parts.keys():
        if len(parts) != len(expected) or not all(
            protocol.is_position(name, protocol.INPUT) for name in parts
        ):
            raise InputError(
                f"model {model.name} takes {_names(expected) or 'one input'}, "
                f"the {which} has {_names(parts) or 'one array'}",
                remedy="give the arrays the names of the model's inputs; a function returns (inputs, labels)",
            )
        arrays = list(parts)
    for (name, shape), array in zip(expected.items(), arrays, strict=True):
        largest, (_, array_shape) = data.max_values.get(array, 0), parts[array]
        if largest > model.max_inputs.get(name, largest):
            problem = f"{_part(model, protocol.INPUT, name)} takes integers up to {model.max_inputs[name]}"
            remedy = "give the input the dtype int64, or number the values from 0"
            raise InputError(f"{problem}, the {which} has {largest}", remedy=remedy)
        if not takes(shape, array_shape):
            raise InputError(
                f"{_part(model, protocol.INPUT, name)} takes samples of shape {show_shape(shape)}, "
                f"the {which} has {show_shape(array_shape)}",
                remedy="change the model's input or the data",
            )


def _names(parts: Mapping[str, object]) -> str:
    return ", ".join(sorted(name for name in parts if name))


def _match(
    model: ModelInfo, outputs: tuple[OutputInfo, ...], data: DatasetInfo, which: str
) -> list[tuple[OutputInfo, str]]:
    """Return each output with the field of its labels, by name or in order. Raises InputError."""
    needed = [output.name for output in outputs if output.loss]
    if data.label_shape == (0,):
        if not needed:
            return []
        raise InputError(
            f"model {model.name} has a loss that compares with labels, the {which} has none",
            remedy="return (samples, labels) from the function of the data",
        )
    fields = [name for name in data.labels if name != protocol.SAMPLE_WEIGHT]
    if len(fields) == 1 and len(outputs) == 1:
        return [(outputs[0], fields[0])]
    if fields == [""] and len(needed) == 1:
        return [(output, "") for output in outputs if output.loss]
    by_name = {output.name: output for output in outputs}
    if set(needed) <= set(fields) <= set(by_name):
        return [(by_name[name], name) for name in fields]
    if len(fields) == len(outputs) and all(protocol.is_position(name, protocol.OUTPUT) for name in fields):
        return list(zip(outputs, fields, strict=True))
    raise InputError(
        f"model {model.name} has the outputs {', '.join(needed) or 'none'} with a loss, "
        f"the {which} has labels {', '.join(filter(None, fields)) or 'for one'}"
        if len(outputs) > 1
        else f"model {model.name} has one output, the {which} has labels {', '.join(fields)}",
        remedy="return a dict of labels with the names of the model's outputs, or a tuple with one for each",
    )


def _check_labels(model: ModelInfo, output: OutputInfo, data: DatasetInfo, field: str, which: str) -> None:
    """Check labels of losses that are known: of a sparse one, integers for each vector of the output."""
    _, shape = data.labels[field]
    labels = f"the {which} has labels" + (f" of {field}" if field and output.name else "")
    is_sparse = plain_name(output.loss) == _SPARSE
    expected = output.shape[:-1] if is_sparse else output.shape
    remedy = "change the model's last layer, the labels or recipe.loss"
    if is_sparse and not equals(expected, shape) and not equals((*expected, 1), shape):
        if equals(output.shape, shape):
            remedy = "use recipe.loss: categorical_crossentropy for one-hot labels"
        needed = (
            f"integer labels of shape {show_shape(expected)}" if expected else "one integer label per sample"
        )
        problem = f"loss {output.loss} needs {needed}, {labels} of shape {show_shape(shape)}"
        raise InputError(problem, remedy=remedy)
    if plain_name(output.loss) in _SAME_SHAPE and not takes(expected, shape):
        if "categorical" in output.loss and len(shape) == len(expected) - 1:
            remedy = "use recipe.loss: sparse_categorical_crossentropy for integer labels"
        name = _part(model, protocol.OUTPUT, output.name)
        problem = f"{name} has outputs of shape {show_shape(expected)}, {labels} of shape {show_shape(shape)}"
        raise InputError(problem, remedy=remedy)
    if is_sparse and not output.ignores_class:
        _check_classes(model, output, data, field, labels=labels)


def _check_classes(
    model: ModelInfo, output: OutputInfo, data: DatasetInfo, field: str, *, labels: str
) -> None:
    """Check the labels of a sparse loss against the number of outputs. `labels`: the labels, in words."""
    largest, dtype = data.max_labels.get(field, data.max_label), data.labels[field][0]
    if largest < 0 or dtype.startswith("float"):
        values = f"of type float or bool, kept as {dtype}" if dtype.startswith("float") else "below 0"
        raise InputError(
            f"loss {output.loss} needs integer labels from 0, {labels} {values}",
            remedy="number the classes from 0: y.astype('int32'); or choose another recipe.loss",
        )
    if not output.shape or 0 < output.shape[-1] <= largest:
        where = f" in {output.name}" if output.name else ""
        problem = (
            f"model {model.name} has {show_shape(output.shape)} outputs{where}, {labels} up to {largest}"
        )
        remedy = "number the classes from 0, or " if output.shape[-1:] == (largest,) else ""
        remedy += f"give the model at least {largest + 1} outputs"
        if empty := list_names([name for name, count in data.class_counts.items() if not count]):
            problem += f"; no usable samples are in {empty}"
            remedy += f", or remove {empty}"
        raise InputError(problem, remedy=remedy)


def show_shape(shape: Sequence[int]) -> str:
    """Return a shape as messages have it: 28×28×1, any×8."""
    return "×".join(str(size) if size else "any" for size in shape) or "1"
