"""The recipe: how to train. Its classes are what job.yaml has (read by pydantic), and what the ranks get."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from csdctl.worker.protocol.json_codec import Between, Bound, Fraction, MaxLength, OneOf, Positive

BF16 = "bf16"

Argument = float | bool | str
"""A keyword argument of a loss, an optimizer or a schedule of Keras."""


@dataclass(frozen=True)
class Written:
    """Converts what job.yaml has for a field, by pydantic. `read` raises ValueError where it cannot."""

    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the schema by which pydantic calls `read`."""
        function = {"type": "no-info", "function": self.read}
        return {"type": "function-before", "function": function, "schema": handler(source)}


def _read_monitor(written: Any) -> Any:
    """Return csdctl's name of a metric. Keras writes val_accuracy for the accuracy on validation data."""
    return re.sub("^val_", "validation_", written) if isinstance(written, str) else written


def _read_losses(written: Any) -> Any:
    """Return losses by output. {name: mse} is one loss with its arguments, not the loss of an output."""
    if not isinstance(written, dict) or isinstance(written.get("name"), str):
        written = {"": written} if written else {}
    return {output: _read_loss(loss) for output, loss in written.items()}


def _read_loss(written: Any) -> Any:
    if not isinstance(written, dict):
        return {"name": written}
    of_term = {key: value for key, value in written.items() if key in ("name", "weight")}
    return of_term | {"args": {key: value for key, value in written.items() if key not in of_term}}


def _read_schedule(written: Any) -> str:
    """Return {name: CosineDecay, initial_learning_rate: 0.1} as Keras serializes the schedule."""
    if written is None:
        return ""
    name = written.get("name") if isinstance(written, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError("expected the `name` of a schedule of Keras, and its arguments")
    arguments = {key: _read_argument(value) for key, value in written.items() if key != "name"}
    return json.dumps({"class_name": name, "config": arguments}, sort_keys=True)


def _read_argument(value: Any, *, may_be_list: bool = True) -> Any:
    if isinstance(value, list) and may_be_list:
        return [_read_argument(item, may_be_list=False) for item in value]
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise ValueError("expected arguments that are numbers, lists of numbers, text, true or false")


def _read_layer(written: Any) -> Any:
    if not written:
        return ""
    if not isinstance(written, dict) or written.keys() != {"until"} or not written["until"]:
        raise ValueError("expected {until: LAYER}")
    return written["until"]


def _check_rate(written: Any) -> Any:
    """Raise ValueError for 0, which only a compiled model's schedule may have at its first step."""
    if isinstance(written, int | float) and written <= 0:
        raise ValueError("expected a number above 0")
    return written


def _refuse(written: Any) -> Any:
    raise ValueError("belongs to `data`")


NumEpochs = Annotated[int, Between(0, 1_000_000)]
NotNegative = Annotated[float, Bound("a number from 0 on", lambda value: value >= 0)]
Monitor = Annotated[str, Written(_read_monitor)]
Mode = Annotated[str, OneOf(("auto", "min", "max"))]
Name = Annotated[str, MaxLength(1 << 16, minimum=1)]
ClassNumber = Annotated[
    str, Bound("the number of a class", lambda value: re.fullmatch("[0-9]{1,6}", value) is not None)
]


@dataclass(frozen=True)
class Noise:
    """Differential privacy of private samples, in the terms of DP-SGD."""

    l2_norm_clip: Positive
    """Upper limit of the L2 norm of one sample's gradient."""
    noise_multiplier: Positive
    """Standard deviation of the noise divided by `l2_norm_clip`."""
    delta: Fraction
    """The δ for which ε is reported; it does not affect training."""


@dataclass(frozen=True)
class EarlyStopping:
    """End the run after `patience` epochs in which `monitor` improved by no more than `min_delta`."""

    monitor: Monitor = "validation_loss"
    """The loss or a metric; with the prefix validation_, or val_, of the validation data."""
    patience: NumEpochs = 5
    min_delta: NotNegative = 0.0
    mode: Mode = "auto"
    """'min' or 'max': what is better; 'auto' infers it from the name of the metric."""
    baseline: float | None = None
    """Epochs that are not better than this count as epochs without improvement."""
    start_from_epoch: NumEpochs = 0
    """Number of epochs at the start of the run that are not considered."""


@dataclass(frozen=True)
class ReduceOnPlateau:
    """Multiply the learning rate by `factor` after `patience` epochs without improvement of `monitor`."""

    monitor: Monitor = "validation_loss"
    patience: NumEpochs = 3
    factor: Fraction = 0.1
    min_delta: NotNegative = 0.0001
    min_factor: Annotated[Positive, Between(0, 1)] = 0.0001
    """Lower limit of the learning rate, relative to the recipe's."""
    mode: Mode = "auto"
    """'min' or 'max': what is better; 'auto' infers it from the name of the metric."""
    cooldown: NumEpochs = 0
    """Number of epochs after a reduction that do not count as epochs without improvement."""


@dataclass(frozen=True)
class LossTerm:
    """A loss by its Keras name, such as `mean_squared_error` or `MeanSquaredError`, or `FILE.py:NAME`."""

    name: Name
    args: dict[str, Argument] = field(default_factory=dict)
    weight: NotNegative = 1.0
    """The weight of this output in the sum over all outputs."""


@dataclass(frozen=True)
class Clip:
    """A limit of the mean gradient over all ranks. One of the three is set."""

    global_norm: Positive | None = None
    norm: Positive | None = None
    """Of each variable's gradient."""
    value: Positive | None = None

    @property
    def limits(self) -> dict[str, float | None]:
        """The limits by the names of Keras' arguments."""
        return {"global_clipnorm": self.global_norm, "clipnorm": self.norm, "clipvalue": self.value}


OneLimit = Bound("one of global_norm, norm and value", lambda clip: [*clip.limits.values()].count(None) == 2)


@dataclass(frozen=True)
class Recipe:
    """How to train. Learning rate: learning_rate · N / reference_batch, ramped from learning_rate.

    A recipe of a job may leave loss, optimizer and learning rate to the model, when it is compiled.
    `worker.compute.recipe` fills them in.
    """

    epochs: Annotated[int, Between(1, 1_000_000)] = 1
    learning_rate: Annotated[NotNegative, Written(_check_rate)] | None = None
    optimizer: str = ""
    """Keras' name of the optimizer; '': the compiled model's, else sgd."""
    optimizer_args: dict[str, Argument] = field(default_factory=dict)
    momentum: Annotated[float, Bound("a number from 0 to below 1", lambda value: 0 <= value < 1)] | None = (
        None
    )
    """This one, and `clip` to `accumulation_steps`: part of `optimizer_args` once job.yaml is loaded."""
    clip: Annotated[Clip, OneLimit] | None = None
    weight_decay: NotNegative | None = None
    ema: Fraction | None = None
    accumulation_steps: Annotated[int, Between(1, 1 << 20)] | None = None
    reference_batch: Annotated[int, Between(1, 1 << 30)] = 256
    warmup_epochs: NotNegative = 0.0
    losses: Annotated[dict[str, LossTerm], Written(_read_losses)] = field(default_factory=dict)
    """Losses by name of the model's output, '' for a model with one; none: the compiled model's."""
    from_logits: bool = False
    """Whether losses that distinguish it get logits."""
    class_weight: dict[ClassNumber, NotNegative] = field(default_factory=dict)
    """The weight of the samples of a class, by its number; 1 for classes that are not listed."""
    input_range: Annotated[tuple[float, float] | None, Written(_refuse)] = (0.0, 1.0)
    """`data.input_range`: the range to which uint8 0…255 is scaled; None leaves the values unchanged."""
    freeze_until: Annotated[str, Written(_read_layer)] = ""
    """The layer that is not trained, with all that lead to it; '' leaves the model as it is."""
    augment: Annotated[str, Written(_refuse)] = ""
    """`data.augment`: the function that changes the samples of every training batch; '': none."""
    views: Annotated[int, Between(0, 1000)] = 0
    """With features: how many results of `augment` are computed of each sample, read by epochs in turn; 0:
    the sample itself."""
    compression: Annotated[str, OneOf(("none", BF16))] = "none"
    """`BF16`: gradients are sent as bfloat16; 'none': as float32."""
    seed: Annotated[int, Between(0, (1 << 31) - 1)] = 0
    max_learning_rate: Positive | None = None
    """Upper limit of the learning rate, however large the global batch is."""
    decay: Annotated[str, OneOf(("none", "linear", "cosine"))] = "none"
    """The fall of the learning rate to zero from the end of the warm-up to that of the last epoch: 'linear'
    or 'cosine'; with 'none' it does not fall."""
    schedule: Annotated[str, Written(_read_schedule)] = ""
    """A schedule of the learning rate by step, as Keras' JSON; it takes the place of `learning_rate`."""
    metrics: tuple[Name, ...] = ()
    """Keras' names of the metrics, or `FILE.py:NAME`; none: the compiled model's."""
    early_stopping: EarlyStopping | None = None
    reduce_on_plateau: ReduceOnPlateau | None = None

    def scale_rate(self, rate: float, global_batch: int) -> float:
        """Return a learning rate at `global_batch` samples per step: linear scaling, up to the maximum."""
        scaled = rate * global_batch / self.reference_batch
        return scaled if self.max_learning_rate is None else min(scaled, self.max_learning_rate)


def learning_rate(
    recipe: Recipe, global_batch: int, epochs_done: float, scheduled: float | None = None
) -> float:
    """Return the rate after `epochs_done` epochs, such as 1.25, at `global_batch` samples per step.

    `scheduled`: the rate of the recipe's schedule at this step, in place of its own. Linear scaling and
    warm-up: Goyal et al. 2017, 2.1–2.2. Paper, section IV. Cosine: Loshchilov and Hutter 2017, equation 5.
    """
    initial = recipe.learning_rate if scheduled is None else scheduled
    assert initial is not None, "the recipe has been resolved with its model"
    target = recipe.scale_rate(initial, global_batch)
    if epochs_done >= recipe.warmup_epochs:
        return target * decay(recipe, epochs_done)
    return initial + (target - initial) * epochs_done / recipe.warmup_epochs


def decay(recipe: Recipe, epochs_done: float) -> float:
    """Return the factor of the learning rate after `epochs_done` epochs, from 1 down to 0."""
    num_decaying = recipe.epochs - recipe.warmup_epochs
    if recipe.decay == "none" or num_decaying <= 0:
        return 1.0
    done = min(1.0, max(0.0, (epochs_done - recipe.warmup_epochs) / num_decaying))
    return 1.0 - done if recipe.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
