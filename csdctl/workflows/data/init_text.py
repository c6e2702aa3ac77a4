"""The text of a first job.yaml, with what was found and why in its comments; pure."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from csdctl.notify import make_printable
from csdctl.worker.protocol.datasets import DataLook, DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.workflows.data.init_choices import (
    Looks,
    LossChoice,
    choose_input_range,
    choose_losses,
    choose_size,
)
from csdctl.workflows.data.init_sources import DataReference, Sources

EPOCHS = 10
LEARNING_RATE = 0.001
OPTIMIZER = "adam"
"""Placeholders, for models that are not compiled."""
MAX_COLUMN = 110
MAX_CLASSES = 12

_PLAIN = re.compile(r"(?:~/|\.{0,2}/|[A-Za-z_])[A-Za-z0-9_./+-]*(?::[A-Za-z0-9_./+-]+)*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off"}


def draft_job(sources: Sources, *, image: Sequence[int] = ()) -> str:
    """Return a job.yaml that is good enough to look at the model and the data with."""
    image_line = [f"  image: {{shape: {_value(list(image))}}}"] if image else []
    head = [*_model_lines(sources, ""), "data:", *_source_lines(sources), *image_line]
    recipe = f"recipe: {{epochs: {EPOCHS}, optimizer: {OPTIMIZER}, learning_rate: {LEARNING_RATE}}}"
    return "\n".join([*head, recipe, ""])


def render_job(sources: Sources, looks: Looks, misfit: str = "") -> str:
    """Return the job.yaml; `misfit` says why model and data do not fit together, '' if they do."""
    problem = _line("", f"THIS DOES NOT FIT YET: {misfit}") if misfit else []
    lines = [
        "# Written by `csdctl init` from a look at the model and the data. Paths are relative to this file.",
        "# All keys: docs/reference/files.md.",
        *problem,
        "",
        *_model_lines(sources, describe_model(looks.model)),
        "",
        "data:",
        *_data_lines(sources, looks),
        "",
        "recipe:",
        *_recipe_lines(looks),
    ]
    return "\n".join(lines) + "\n"


def describe_model(model: ModelInfo) -> str:
    """Return in words: parameters, inputs, outputs."""
    frozen = model.num_parameters - model.num_trainable
    size = f"{model.num_parameters:,} parameters" + (f" ({frozen:,} not trainable)" if frozen else "")
    inputs = model.inputs or {"": model.input_shape}
    takes = " and ".join(f"{name} {_shape(shape)}".strip() for name, shape in inputs.items())
    returns = " and ".join(map(_describe_output, model.outputs)) or "unknown outputs"
    return f"{size}; takes {takes}, returns {returns}"


def describe_data(look: DataLook) -> str:
    """Return in words: format, number of samples and classes, shapes, types, sizes of pictures."""
    info = look.info
    counted = f"{look.num_samples:,} samples" if look.num_samples else "samples of unknown number"
    parts = [f"{look.format}: {counted}"]
    if look.class_counts:
        parts[0] = f"{look.format}: {look.num_samples:,} files in {len(look.class_counts)} classes"
        low, high = min(look.class_counts.values()), max(look.class_counts.values())
        parts.append(f"{low:,} to {high:,} files each" if low != high else f"{low:,} files each")
    if look.pictures:
        sizes = look.pictures
        same = sizes.smallest == sizes.largest
        size = _shape(sizes.smallest) if same else f"{_shape(sizes.smallest)} to {_shape(sizes.largest)}"
        parts.append(f"{' and '.join(sizes.formats)}, {size} pixels (height×width)")
    else:
        parts.append(f"samples {_describe_parts(info.inputs)}")
    if not look.class_counts:
        labels = _describe_parts(info.labels) if info.label_shape != (0,) else "none"
        parts.append(f"labels {labels}" + (f" 0…{info.max_label}" if info.max_label >= 0 else ""))
    if not look.is_whole:
        parts.append(f"{info.num_samples + sum(info.num_skipped.values()):,} were looked at")
    parts += _skipped(info)
    return ", ".join(parts)


def _skipped(info: DatasetInfo) -> list[str]:
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in info.num_skipped.items())
    padded = ", ".join(f"{name} to {_shape(shape)}".strip() for name, shape in info.padded.items())
    return [f"left out: {reasons}"] * bool(reasons) + [f"padded with 0: {padded}"] * bool(padded)


def _model_lines(sources: Sources, comment: str) -> list[str]:
    lines = _line(f"model: {_value(sources.model)}", comment)
    if sources.model_args:
        lines += _line(
            f"model_args: {_value(sources.model_args)}",
            "weights: null trains from scratch; imagenet starts from Keras' pretrained weights"
            if comment and sources.is_application and sources.model_args.get("weights", "") is None
            else "",
        )
    elif comment and sources.model.rpartition(":")[0].endswith(".py"):
        lines += _line("# model_args: {}", "arguments of the function")
    if sources.code:
        lines += _line(
            f"code: {_value(list(sources.code))}", "imported by the files above" if comment else ""
        )
    elif comment:
        lines += _line("# code: [my_layers.py]", "files with layers, losses and metrics of your own")
    return lines


def _source_lines(sources: Sources) -> list[str]:
    lines = [f"  public: {_reference(sources.public)}"]
    if sources.validation:
        lines.append(f"  validation: {_reference(sources.validation)}")
    if sources.private:
        lines.append(f"  private: {_reference(_private(sources))}")
    return lines


def _private(sources: Sources) -> DataReference:
    return DataReference(sources.private, sources.public.function)


def _data_lines(sources: Sources, looks: Looks) -> list[str]:
    lines = _line(f"public: {_reference(sources.public)}", describe_data(looks.public), 2)
    if sources.validation and looks.validation:
        lines += _line(f"validation: {_reference(sources.validation)}", describe_data(looks.validation), 2)
    else:
        why = "evaluated after each epoch, for val_loss, early_stopping and best.keras"
        lines += _line("# validation: {path: PATH}", why, 2)
    if sources.private:
        why = "on each node, whose home is ~; never leaves it; was not looked at"
        lines += _line(f"private: {_reference(_private(sources))}", why, 2)
    else:
        why = "data on each node that only that node may read, at the same path on all"
        lines += _line("# private: {path: PATH}", why, 2)
    if scaled := choose_input_range(sources, looks):
        lines += _line(f"input_range: {scaled[0]}", scaled[1], 2)
    return lines + _format_lines(looks)


def _format_lines(looks: Looks) -> list[str]:
    look = looks.public
    lines: list[str] = []
    if look.class_counts:
        names = list(look.class_counts)
        is_short = len(names) <= MAX_CLASSES
        listed = _value(names) if is_short else f"{_value(names[:MAX_CLASSES])[:-1]}, …]"
        lines += _line(f"# classes: {listed}", "the order of the labels: the public folders, sorted", 2)
    if look.table:
        (label,) = look.table.labels
        entry: dict[str, Any] = {"label": label} | (
            {"drop": list(look.table.dropped)} if look.table.dropped else {}
        )
        why = "drop: [COLUMN] leaves out columns, weight: COLUMN has the samples' weights"
        lines += _line(f"csv: {_value(entry)}", why, 2)
    if look.records:
        entry = {"image": look.records.image, "label": look.records.label}
        lines += _line(f"tfrecord: {_value(entry)}", "features of the first example", 2)
    if look.format in ("class folders", "tfrecord"):
        lines += _image_lines(looks)
    return lines


def _image_lines(looks: Looks) -> list[str]:
    if is_any_size(looks.model):
        shape = list(looks.public.info.sample_shape)
        why = f"the model takes any size: {choose_size(looks.public)[1]}"
        return _line(f"image: {{shape: {_value(shape)}}}", why, 2)
    why = f"pictures are stretched to the model's {_shape(looks.model.input_shape)}; or crop, or pad"
    return _line("# image: {fit: stretch}", why, 2)


def is_any_size(model: ModelInfo) -> bool:
    """Return whether the size of the pictures that a model takes is not known from the model."""
    return len(model.input_shape) != 3 or 0 in model.input_shape


def _recipe_lines(looks: Looks) -> list[str]:
    compiled = looks.model.compiled
    lines = _line(f"epochs: {EPOCHS}", "a placeholder: as many as you give to fit()", 2)
    if compiled and compiled.schedule:
        why = f"compile() has {compiled.schedule} from {compiled.learning_rate:g}, which is kept"
        lines += _line(f"# learning_rate: {_value(compiled.learning_rate)}", why, 2)
    elif compiled and compiled.optimizer:
        why = f"of compile(): {compiled.optimizer}"
        lines += _line(f"# learning_rate: {_value(compiled.learning_rate)}", why, 2)
    else:
        why = "a placeholder: the model is not compiled" + (" with an optimizer" if compiled else "")
        lines += _line(f"learning_rate: {LEARNING_RATE}", why, 2)
        lines += _line(f"optimizer: {OPTIMIZER}", "a placeholder; any optimizer of Keras", 2)
    why = (
        "batch size that the learning rate is for, such as fit's batch_size (32 unless given): at global "
        "batch size N the rate is learning_rate · N / reference_batch"
    )
    lines += _line("# reference_batch: 256", why, 2)
    lines += _loss_lines(looks)
    lines += _metric_lines(looks)
    lines += _weight_lines(looks.public)
    watched = "the validation loss" if looks.validation else "the training loss, without data.validation"
    lines += _line(
        "# early_stopping: {patience: 5}", f"like keras.callbacks.EarlyStopping; watches {watched}", 2
    )
    return lines + _line("# seed: 0", "of weights, shards and the order of samples", 2)


def _loss_lines(looks: Looks) -> list[str]:
    model, losses = looks.model, choose_losses(looks)
    if not losses:
        named = {output.name: output.loss for output in model.outputs if output.loss}
        if model.compiled and model.compiled.has_loss and named:
            value = _value(named) if len(model.outputs) > 1 else _value(next(iter(named.values())))
            return _line(f"# loss: {value}", "of compile()", 2)
        return _line("# loss: mean_squared_error", "none: the model's layers add their own, if any", 2)
    if "" not in losses:
        lines = _line("loss:", "of each output", 2)
        for name, choice in losses.items():
            value = choice.name
            if choice.from_logits:
                value = _value({"name": choice.name, "from_logits": True})
            lines += _line(f"{_value(name)}: {value}", choice.reason, 4)
        return lines
    return _only_loss(losses[""], looks.model.outputs)


def _only_loss(choice: LossChoice, outputs: Sequence[OutputInfo]) -> list[str]:
    lines = _line(f"loss: {choice.name}", choice.reason, 2)
    activation = outputs[0].activation if outputs else ""
    if choice.from_logits:
        return lines + _line("from_logits: true", "the last layer is linear: its outputs are logits", 2)
    if choice.from_logits is None:
        last = f" ({activation})" if activation else ""
        why = f"if the outputs are logits, which the last layer{last} does not say"
        return lines + _line("# from_logits: true", why, 2)
    return lines


def _metric_lines(looks: Looks) -> list[str]:
    compiled = looks.model.compiled
    if compiled:
        named = _value(list(compiled.metrics)) if compiled.metrics else "[accuracy]"
        return _line(f"# metrics: {named}", "of compile()" if compiled.metrics else "compile() has none", 2)
    return _line("# metrics: [accuracy]", "the default for classifiers; Keras' names, or FILE.py:NAME", 2)


def _weight_lines(look: DataLook) -> list[str]:
    counts: list[int] = list(look.class_counts.values())
    if counts and min(counts) > 0 and max(counts) >= 2 * min(counts):
        mean = sum(counts) / len(counts)
        weights = {str(label): round(mean / count, 3) for label, count in enumerate(counts)}
        why = "as fit's class_weight; these values make up for the different numbers of files"
        if len(weights) <= MAX_CLASSES:
            return _line(f"# class_weight: {_value(weights)}", why, 2)
    return _line('# class_weight: {"0": 1.0, "1": 5.0}', "as fit's class_weight", 2)


def _describe_output(output: OutputInfo) -> str:
    if not output.is_known:
        return "outputs that are known only by calling it"
    last = f" ({output.activation})" if output.activation else ""
    return f"{output.name} {_shape(output.shape)}{last}".strip()


def _describe_parts(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return " and ".join(
        f"{name} {dtype} {_shape(tuple(shape)) if shape else ''}".strip()
        for name, (dtype, shape) in parts.items()
    )


def _shape(shape: Sequence[int]) -> str:
    return "×".join(str(size) if size else "any" for size in shape) or "1"


def _reference(data: DataReference) -> str:
    return _value({"path": data.path} | ({"function": data.function} if data.function else {}))


def _value(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_value(str(key))}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if is_plain else json.dumps(value, ensure_ascii=not value.isprintable())
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _line(text: str, comment: str = "", indent: int = 0) -> list[str]:
    """Return an entry with its comment: behind it if there is room, otherwise above it."""
    space = " " * indent
    comment = make_printable(" ".join(comment.split()))
    if not comment:
        return [f"{space}{text}"]
    beside = f"{space}{text}  # {comment}"
    if text and len(beside) <= MAX_COLUMN:
        return [beside]
    above = textwrap.wrap(comment, MAX_COLUMN - indent - 2, break_long_words=False, break_on_hyphens=False)
    return [*(f"{space}# {part}" for part in above), *([f"{space}{text}"] if text else [])]
