"""The recipe: how to train."""

import math
from dataclasses import dataclass, field
from typing import Annotated

from csdctl.worker.protocol.json_codec import Between, Bound, Fraction, OneOf, Positive

Argument = float | bool | str
"""A keyword argument of a loss, an optimizer or a schedule of Keras."""


BF16 = "bf16"


@dataclass(frozen=True)
class Noise:
    """Differential privacy of private samples, in the terms of DP-SGD."""

    l2_norm_clip: Positive
    """Upper limit of the L2 norm of one sample's gradient."""
    noise_multiplier: Positive
    """Standard deviation of the noise divided by `l2_norm_clip`."""
    delta: Fraction
    """The δ for which ε is reported; it does not affect training."""


NumEpochs = Annotated[int, Between(0, 1_000_000)]
MinDelta = Annotated[float, Bound("a number from 0 on", lambda value: value >= 0)]
Mode = Annotated[str, OneOf(("auto", "min", "max"))]


@dataclass(frozen=True)
class EarlyStopping:
    """End the run after `patience` epochs in which `monitor` improved by no more than `min_delta`."""

    monitor: str = "validation_loss"
    """The loss or a metric; with the prefix validation_, or val_, that of the validation data."""
    patience: NumEpochs = 5
    min_delta: MinDelta = 0.0
    mode: Mode = "auto"
    """'min' or 'max': what is better; 'auto' infers it from the name of the metric."""
    baseline: float | None = None
    """Epochs that are not better than this count as epochs without improvement."""
    start_from_epoch: NumEpochs = 0
    """Number of epochs at the start of the run that are not considered."""


@dataclass(frozen=True)
class ReduceOnPlateau:
    """Multiply the learning rate by `factor` after `patience` epochs without improvement of `monitor`."""

    monitor: str = "validation_loss"
    patience: NumEpochs = 3
    factor: Fraction = 0.1
    min_delta: MinDelta = 0.0001
    min_factor: Annotated[Positive, Between(0, 1)] = 0.0001
    """Lower limit of the learning rate, relative to the recipe's."""
    mode: Mode = "auto"
    """'min' or 'max': what is better; 'auto' infers it from the name of the metric."""
    cooldown: NumEpochs = 0
    """Number of epochs after a reduction that do not count as epochs without improvement."""


@dataclass(frozen=True)
class LossTerm:
    """A loss by its Keras name, such as `mean_squared_error` or `MeanSquaredError`, or `FILE.py:NAME`."""

    name: str
    args: dict[str, Argument] = field(default_factory=dict)
    weight: float = 1.0
    """The weight of this output in the sum over all outputs."""


@dataclass(frozen=True)
class Recipe:
    """How to train. Learning rate: learning_rate · N / reference_batch, ramped from learning_rate.

    A recipe of a job may leave loss, optimizer and learning rate to the model, when it is compiled.
    `worker.compute.recipe` fills them in.
    """

    epochs: int = 1
    optimizer: str = ""
    """Keras' name of the optimizer; '': the compiled model's, else sgd."""
    optimizer_args: dict[str, Argument] = field(default_factory=dict)
    learning_rate: float | None = None
    reference_batch: int = 256
    warmup_epochs: float = 0.0
    losses: dict[str, LossTerm] = field(default_factory=dict)
    """Losses by name of the model's output, '' for a model with one; none: the compiled model's."""
    from_logits: bool = False
    """Whether losses that distinguish it get logits."""
    class_weight: dict[str, float] = field(default_factory=dict)
    """The weight of the samples of a class, by its number; 1 for classes that are not listed."""
    input_range: tuple[float, float] | None = (0.0, 1.0)
    """Range to which uint8 0…255 is scaled; None leaves the values unchanged."""
    freeze_until: str = ""
    """The layer that is not trained, with all that lead to it; '' leaves the model as it is."""
    augment: str = ""
    """`FILE.py:NAME` of the function that changes the samples of every training batch; '': none."""
    views: int = 0
    """With features: how many results of `augment` are computed of each sample, read by epochs in turn; 0:
    the sample itself."""
    compression: str = "none"
    """`BF16`: gradients are sent as bfloat16; 'none': as float32."""
    seed: int = 0
    max_learning_rate: float | None = None
    """Upper limit of the learning rate, however large the global batch is."""
    decay: str = "none"
    """The fall of the learning rate to zero from the end of the warm-up to that of the last epoch: 'linear'
    or 'cosine'; with 'none' it does not fall."""
    schedule: str = ""
    """A schedule of the learning rate by step, as Keras' JSON; it takes the place of `learning_rate`."""
    metrics: tuple[str, ...] = ()
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

    `scheduled`: that of the recipe's schedule at this step, in place of its rate. Linear scaling and warm-up:
    Goyal et al. 2017, 2.1–2.2. Paper, section IV. Cosine: Loshchilov and Hutter 2017, equation 5.
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
