"""What `build` found out about a model."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelInfo:
    """A model as `build` found it: what must fit the data, and its size."""

    name: str
    input_shape: tuple[int, ...]
    """Of the only input; () when there are several."""
    output_shape: tuple[int, ...]
    num_parameters: int
    num_trainable: int
    output_activation: str
    """Of the last layer: 'softmax', 'linear', …; '' when it has none that is known."""
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of each input by its name, when there are several."""
    num_operations: int = 0
    """Floating-point operations of the forward pass for one sample, of matrix products and convolutions;
    a multiply-accumulate is two. 0: not known."""
    stateful_layers: tuple[str, ...] = ()
    """Layers that keep something of the samples they train on: batch norm and such."""
