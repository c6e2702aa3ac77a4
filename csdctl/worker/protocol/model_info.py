"""Properties of a model that `build` determined."""

from dataclasses import dataclass, field

from csdctl.worker.protocol.bounds import Count, Shape


@dataclass(frozen=True)
class ModelInfo:
    """Size of a model, and the shapes that data must fit."""

    name: str
    input_shape: Shape
    """Of the only input; () if there are several."""
    output_shape: Shape
    num_parameters: Count
    num_trainable: Count
    output_activation: str
    """Of the last layer: 'softmax', 'linear', …; '' if unknown."""
    inputs: dict[str, Shape] = field(default_factory=dict)
    """Shape of each input by name, if there are several."""
    num_operations: Count = 0
    """Floating-point operations (FLOPs) of the forward pass for one sample, in matrix products and
    convolutions; a multiply-accumulate counts as two. 0 if unknown."""
    stateful_layers: tuple[str, ...] = ()
    """Layers that keep state of the samples they train on, such as batch norm."""
