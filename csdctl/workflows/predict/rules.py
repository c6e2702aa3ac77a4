"""Rules for what is kept of each output of a model, and the layers whose output can be asked for."""

import difflib
import json

from csdctl.documents import MAX_JSON_BYTES, load_text
from csdctl.errors import InputError
from csdctl.job.compatibility import LOGITS
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, VALUES, ResultRule
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.workflows.data.model import SerializedModel
from csdctl.workflows.predict.request import CLASSES, EMBEDDINGS

_SPARSE = "sparsecategoricalcrossentropy"
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
