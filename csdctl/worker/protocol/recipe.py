"""The recipe: how to train."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Noise:
    """Differential privacy of private samples, in the terms of DP-SGD."""

    l2_norm_clip: float
    """Upper limit of the L2 norm of one sample's gradient."""
    noise_multiplier: float
    """Standard deviation of the noise divided by `l2_norm_clip`."""
    delta: float
    """The δ for which ε is reported; it does not affect training."""


@dataclass(frozen=True)
class EarlyStopping:
    """End the run after `patience` epochs in which `monitor` improved by no more than `min_delta`."""

    monitor: str = "validation_loss"
    patience: int = 5
    min_delta: float = 0.0


@dataclass(frozen=True)
class ReduceOnPlateau:
    """Multiply the learning rate by `factor` after `patience` epochs without improvement of `monitor`."""

    monitor: str = "validation_loss"
    patience: int = 3
    factor: float = 0.1
    min_delta: float = 0.0001
    min_factor: float = 0.0001
    """Lower limit of the learning rate, relative to the recipe's."""


@dataclass(frozen=True)
class Recipe:
    """How to train. Learning rate: learning_rate · N / reference_batch, ramped from learning_rate."""

    epochs: int = 1
    optimizer: str = "sgd"
    optimizer_args: dict[str, float | bool] = field(default_factory=dict)
    learning_rate: float = 0.01
    reference_batch: int = 256
    warmup_epochs: float = 0.0
    loss: str = "sparse_categorical_crossentropy"
    from_logits: bool = False
    input_range: tuple[float, float] | None = (0.0, 1.0)
    """Range to which uint8 0…255 is scaled; None leaves the values unchanged."""
    seed: int = 0
    max_learning_rate: float | None = None
    """Upper limit of the learning rate, however large the global batch is."""
    decay: str = "none"
    """How the learning rate falls to zero from the end of the warm-up to the end of the last epoch: 'linear'
    or 'cosine'; with 'none' it does not fall."""
    metrics: tuple[str, ...] = ()
    early_stopping: EarlyStopping | None = None
    reduce_on_plateau: ReduceOnPlateau | None = None
