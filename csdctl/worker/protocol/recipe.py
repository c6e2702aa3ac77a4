"""The recipe: how to train."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Noise:
    """Differential privacy of private samples, by the terms of DP-SGD."""

    l2_norm_clip: float
    """The largest L2 norm of one sample's gradient."""
    noise_multiplier: float
    """The noise's standard deviation over `l2_norm_clip`."""
    delta: float
    """For which ε is told; it changes nothing in training."""


@dataclass(frozen=True)
class EarlyStopping:
    """End the run after `patience` epochs in which `monitor` did not get better by more than `min_delta`."""

    monitor: str = "validation_loss"
    patience: int = 5
    min_delta: float = 0.0


@dataclass(frozen=True)
class ReduceOnPlateau:
    """Multiply the learning rate by `factor` after `patience` epochs without a gain in `monitor`."""

    monitor: str = "validation_loss"
    patience: int = 3
    factor: float = 0.1
    min_delta: float = 0.0001
    min_factor: float = 0.0001
    """The learning rate never falls below this share of the recipe's."""


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
    """What uint8 0…255 becomes; None leaves the values as they are."""
    seed: int = 0
    max_learning_rate: float | None = None
    """However large the global batch is, the learning rate is at most this."""
    decay: str = "none"
    """How the learning rate falls from the end of the warm-up to the end of the last epoch: 'none', 'linear'
    or 'cosine', to zero."""
    metrics: tuple[str, ...] = ()
    early_stopping: EarlyStopping | None = None
    reduce_on_plateau: ReduceOnPlateau | None = None
