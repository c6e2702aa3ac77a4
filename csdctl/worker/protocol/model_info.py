"""Properties of a model that `build` determined."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelInfo:
    """Size of a model, and the shapes that data must fit."""

    name: str
    input_shape: tuple[int, ...]
    """Of the only input; () if there are several."""
    output_shape: tuple[int, ...]
    num_parameters: int
    num_trainable: int
    output_activation: str
    """Of the last layer: 'softmax', 'linear', …; '' if unknown."""
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each input by name, if there are several."""
    num_operations: int = 0
    """Floating-point operations (FLOPs) of the forward pass for one sample, in matrix products and
    convolutions; a multiply-accumulate counts as two. 0 if unknown."""
    stateful_layers: tuple[str, ...] = ()
    """Layers that keep state of the samples they train on, such as batch norm."""
