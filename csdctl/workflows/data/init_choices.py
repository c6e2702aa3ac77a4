"""What `init` concludes from a first look at model and data; pure."""

from dataclasses import dataclass
from typing import Any

from csdctl.job.compatibility import LOGITS
from csdctl.worker.protocol.datasets import SAMPLE_WEIGHT, DataLook, DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.workflows.data.init_sources import Sources

Shape = tuple[int, ...]

DEFAULT_SIZE = (224, 224)
"""Height and width that most models of keras.applications were made for."""
MIN_APPLICATION_SIZE = 32
_SYMMETRIC = (
    "MobileNet",
    "MobileNetV2",
    "InceptionV3",
    "InceptionResNetV2",
    "Xception",
    "NASNetMobile",
    "NASNetLarge",
    "ResNet50V2",
    "ResNet101V2",
    "ResNet152V2",
)
"""Of keras.applications, with weights that were trained on values of -1 to 1."""


@dataclass(frozen=True)
class Looks:
    """What was seen of a model and its data."""

    model: ModelInfo
    public: DataLook
    validation: DataLook | None = None


@dataclass(frozen=True)
class LossChoice:
    """The loss of one output, and why; `from_logits` None: unknown."""

    name: str
    from_logits: bool | None
    reason: str


def choose_size(data: DataLook) -> tuple[Shape, str]:
    """Return height and width for pictures, and why, for a model that takes any."""
    sizes = data.pictures
    if sizes is None:
        return DEFAULT_SIZE, "a placeholder"
    if sizes.smallest == sizes.largest:
        return sizes.smallest, "the size of all pictures that were looked at"
    return DEFAULT_SIZE, "a placeholder: the pictures have different sizes"


def choose_application_args(data: DataLook) -> dict[str, Any]:
    """Return arguments for a model of keras.applications: to train from scratch on these pictures."""
    shape = data.info.sample_shape
    size, channels = choose_size(data)[0] if data.pictures else shape[:2], 3
    if not data.pictures and len(shape) == 3:
        channels = shape[2]
    size = tuple(max(MIN_APPLICATION_SIZE, side) for side in size)
    arguments: dict[str, Any] = {"input_shape": [*size, channels], "weights": None}
    if (num_classes := count_classes(data)) > 0:
        arguments["classes"] = num_classes
    return arguments


def count_classes(data: DataLook) -> int:
    """Return the number of classes; 0 if the labels are not numbers of classes."""
    return len(data.class_counts) or data.info.max_label + 1


def choose_input_range(sources: Sources, looks: Looks) -> tuple[str, str] | None:
    """Return the value of `data.input_range` and why, None for data that it does not apply to."""
    if not any(dtype == "uint8" for dtype, _ in looks.public.info.inputs.values()):
        return None
    if looks.model.scaling_layers:
        return "null", f"the model scales its inputs itself: {', '.join(looks.model.scaling_layers[:3])}"
    name = sources.model.partition(":")[2]
    if sources.is_application and name in _SYMMETRIC and sources.model_args.get("weights", "imagenet"):
        return "[-1, 1]", f"as keras.applications' preprocess_input of {name}"
    return "[0, 1]", "uint8 values 0…255 become 0…1; the model has no Rescaling layer"


def choose_losses(looks: Looks) -> dict[str, LossChoice]:
    """Return the losses that the recipe has to name, by output, '' for the only one.

    None for a compiled model, unless its last layer gives logits and its loss does not know.
    """
    model, data = looks.model, looks.public.info
    if model.compiled:
        return _mend_logits(model)
    fields = [name for name in data.labels if name != SAMPLE_WEIGHT]
    if data.label_shape == (0,) or not fields:
        return {}
    outputs = model.outputs
    if len(outputs) == 1:
        return {"": _guess(outputs[0], data, fields[0])}
    names = [output.name for output in outputs]
    by_output = dict(zip(names, names if set(names) <= set(fields) else fields, strict=False))
    return {
        output.name: _guess(output, data, by_output[output.name])
        for output in outputs
        if output.name in by_output
    }


def _mend_logits(model: ModelInfo) -> dict[str, LossChoice]:
    if len(model.outputs) != 1:
        return {}
    output = model.outputs[0]
    if output.activation != "linear" or output.from_logits or _plain(output.loss) not in LOGITS:
        return {}
    reason = "compile() has this loss without from_logits=True, but the last layer is linear: it gives logits"
    return {"": LossChoice(output.loss, True, reason)}


def _guess(output: OutputInfo, data: DatasetInfo, field: str) -> LossChoice:
    """Return a loss that labels and last layer suggest."""
    dtype, shape = data.labels[field]
    shape, largest = tuple(shape), data.max_labels.get(field, -1)
    is_integer = dtype.startswith(("int", "uint"))
    kind = f"labels are {dtype}"
    if is_integer:
        kind += f" 0…{largest}" if largest >= 0 else ", some below 0"
    if not output.is_known:
        name = "sparse_categorical_crossentropy" if is_integer and largest >= 0 else "mean_squared_error"
        return LossChoice(name, None, f"a guess: {kind}; the model's outputs are not known before training")
    classes = output.shape[-1] if output.shape else 0
    places = tuple(output.shape[:-1])
    if (
        is_integer
        and largest >= 0
        and classes > 1
        and (_equals(places, shape) or _equals((*places, 1), shape))
    ):
        return _with_logits(
            "sparse_categorical_crossentropy", output, f"{kind}, the model has {classes} outputs"
        )
    if output.activation == "softmax" and shape == output.shape:
        return _with_logits("categorical_crossentropy", output, "labels have the shape of the softmax")
    is_binary = is_integer and 0 <= largest <= 1
    if output.activation == "sigmoid" or (is_binary and classes == 1):
        why = f"{kind}, the last layer is a {output.activation or 'layer of one unit'}"
        return _with_logits("binary_crossentropy", output, why)
    return LossChoice(
        "mean_squared_error", False, f"a guess: {kind}, the last layer is {output.activation or 'unknown'}"
    )


def _with_logits(name: str, output: OutputInfo, reason: str) -> LossChoice:
    if output.activation == "linear":
        return LossChoice(name, True, reason)
    return LossChoice(name, False if output.activation == LOGITS[_plain(name)] else None, reason)


def _equals(expected: Shape, shape: Shape) -> bool:
    """Return whether shapes are equal; 0 is any size."""
    return len(expected) == len(shape) and all(
        a == b or 0 in (a, b) for a, b in zip(expected, shape, strict=True)
    )


def _plain(loss: str) -> str:
    return loss.replace("_", "").lower()
