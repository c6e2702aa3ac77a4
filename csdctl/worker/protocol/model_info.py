"""The requests to build a model and to try `data.augment`, and the properties of a model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from csdctl.worker.protocol.datasets import DatasetInfo, Largest
from csdctl.worker.protocol.json_codec import BatchSize, Between, Count, Seconds, Shape
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime, UserCode

BUILDER = "csdctl_builder"
"""Key of architecture.json for a model that a function of the user's builds on every rank: its BuildSpec."""

SETTINGS = "csdctl_keras_settings"
"""Key of architecture.json for floatx, epsilon and image format of Keras on the host."""

PartSeconds = Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True)
class BuildSpec:
    """A request to `build` a model."""

    reference: str
    """`keras.applications:NAME`, `PATH.keras` or `PATH.py:FUNCTION`."""
    arguments: dict[str, Any]
    recipe: Recipe
    directory: str
    code_roots: tuple[str, ...] = ()
    """The user's Python files and packages, which are sent to the nodes when the model needs them."""
    sample_shapes: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    """Type and shape of each array of a sample, '' for the only one; none: not known yet."""
    step: str = ""
    """`PATH.py:FUNCTION` that takes the place of the model's train_step; '' for none."""


@dataclass(frozen=True)
class BuildRequest:
    """The request of `build`."""

    spec: BuildSpec
    output: str


@dataclass(frozen=True)
class CompileRequest:
    """The request to compile a step or a forward pass of a model that was built."""

    architecture: str
    weights: str
    recipe: Recipe
    data: DatasetInfo
    """A data set, whose shapes and types samples and labels have."""
    output: str
    """The directory to write the files of a `CompiledStep` to."""
    code: UserCode | None = None
    is_forward: bool = False
    """Whether the forward pass is compiled, which depends on only the samples' form and `input_range`."""
    layer: str = ""
    """Of a forward pass: the layer whose output is computed in place of the model's; '' for none."""
    has_noise: bool = False
    has_validation: bool = False
    is_wide: bool = False
    """Whether layers that compute in 16 bits compute in 32, for `verify`."""
    cut: str = ""
    """The layer after which the model is cut in two; '' for a whole model."""


@dataclass(frozen=True)
class CompileRequests:
    """The request to compile steps and forward passes in one process."""

    requests: tuple[CompileRequest, ...]


@dataclass(frozen=True)
class Compiled:
    """The answer to `CompileRequests`."""

    reasons: tuple[str, ...]
    """Why each needs Python's TensorFlow, and nothing was written; '' for what is compiled."""


@dataclass(frozen=True)
class OutputInfo:
    """One output of a model, and its loss."""

    name: str
    shape: Shape
    activation: str
    """The activation of its last layer: 'softmax', 'linear', …; '' if unknown."""
    loss: str
    """Keras' name, such as 'sparse_categorical_crossentropy'; '' if the output has none."""
    is_known: bool = True
    """False: the model is a subclass, whose outputs are known only by calling it."""
    from_logits: bool = False
    ignores_class: bool = False
    """Whether the loss leaves out labels of a certain value (`ignore_class`)."""


@dataclass(frozen=True)
class OwnCompile:
    """The arguments of the model's `compile`, before the job's recipe. Its losses are in its outputs."""

    optimizer: str
    """Keras' name, such as 'Adam'; '' for none."""
    learning_rate: float
    """The first one of a schedule; 0 without an optimizer."""
    schedule: str = ""
    """Keras' name, such as 'CosineDecay'; '' for none."""
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class CutInfo:
    """A place where a model can be divided: one tensor, through which everything passes."""

    layer: str
    num_bytes: Count
    """The bytes of one sample's activations; 0 if the size varies."""
    num_operations: Count
    num_trainable: Count


@dataclass(frozen=True)
class FeatureInfo:
    """A model's frozen part, whose output each sample needs only once."""

    layer: str
    shape: Shape
    head_weights: tuple[Count, ...]
    """The place of each of the head's weights among those of the whole model."""


@dataclass(frozen=True)
class ModelInfo:
    """Size of a model, and the shapes that data must fit."""

    name: str
    inputs: dict[str, Shape]
    """Shape of each input by name, '' for the only one; {} if they are unknown."""
    num_parameters: Count
    num_trainable: Count
    num_operations: Count = 0
    """Floating-point operations (FLOPs) of the forward pass for one sample, in matrix products and
    convolutions; a multiply-accumulate counts as two. 0 if unknown."""
    stateful_layers: tuple[str, ...] = ()
    """Layers that keep state of the samples they train on, such as batch norm."""
    outputs: tuple[OutputInfo, ...] = ()
    recipe: Recipe = field(default_factory=Recipe)
    """The job's recipe, with what the compiled model adds."""
    needs_code: bool = False
    """Whether the nodes need the job's code to build the model."""
    features: FeatureInfo | None = None
    """None if the model has no frozen part at its beginning; then `no_features` says why."""
    no_features: str = ""
    cuts: tuple[CutInfo, ...] = ()
    """Where nodes and host can divide the model between them, from the input on."""
    is_built: bool = True
    """False: it is a subclass that gets its weights by being called; nothing but its name is known."""
    compiled: OwnCompile | None = None
    has_own_step: bool = False
    """Whether it has its own train_step: it is not divided, and its batches not into micro-batches."""
    max_inputs: dict[str, Largest] = field(default_factory=dict)
    has_16_bits: bool = False
    scaling_layers: tuple[str, ...] = ()
    """Layers that scale what they are given, such as 'rescaling (Rescaling)'."""

    @property
    def input_shape(self) -> Shape:
        """The shape of the only input. () if there are several."""
        return self.inputs.get("", ())


@dataclass(frozen=True)
class PartsSpec:
    """A request to time a model's parts with random samples. One line of standard input."""

    architecture: str
    weights: str
    recipe: Recipe
    runtime: Runtime
    data: DatasetInfo
    """The public data set: random samples of its shape and type are used."""
    batch_size: BatchSize
    cuts: tuple[str, ...] = ()
    prefix: Prefix | None = None
    """The frozen part whose output is computed ahead, if any."""
    code: UserCode | None = None
    min_duration_s: Seconds = 0.5


@dataclass(frozen=True)
class CutTimes:
    """Seconds of the parts of a batch, with the model cut after `layer`."""

    layer: str
    forward_s: PartSeconds
    backward_s: PartSeconds
    head_s: PartSeconds


@dataclass(frozen=True)
class PartTimes:
    """Seconds that a batch takes."""

    step_s: PartSeconds
    """Forward and backward pass and the optimizer's step of the whole model."""
    evaluation_s: PartSeconds
    """Forward pass of the whole model, as for validation."""
    features_s: PartSeconds
    """The seconds of the frozen part, as features are computed; 0 if there is none."""
    cuts: tuple[CutTimes, ...]
    why_not: str = ""
    """Why it cannot be divided at the others."""


@dataclass(frozen=True)
class AugmentTrial:
    """A request to try `data.augment`, in the same way as a rank runs it."""

    reference: str
    code: UserCode
    samples: DatasetSlice
    seed: int


def find_unsaved(model: Any, rebuilt: Any) -> str:
    """Return what is set on a variable of a Keras model and lost in one rebuilt from its config, or ''."""
    for variable, rules, rebuilt_rules in zip(model.weights, _rules(model), _rules(rebuilt), strict=False):
        if lost := rules - rebuilt_rules:
            return f"{variable.path}: {min(lost)} is set on the variable, which Keras does not save"
    return ""


def _rules(model: Any) -> Iterator[set[str]]:
    optimizers = [value for value in vars(model).values() if hasattr(value, "_use_weight_decay")]
    optimizers = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
    for weight in model.weights:
        rules = {name: getattr(weight, name) for name in ("trainable", "regularizer", "constraint")}
        rules["weight_decay"] = all(optimizer._use_weight_decay(weight) for optimizer in optimizers)
        yield {f"{k}={v.get_config() if hasattr(v, 'get_config') else v}" for k, v in rules.items()}


@dataclass(frozen=True)
class ScriptRequest:
    """The request to run a training script up to its call of `fit`."""

    script: str
    """A path, relative to the current directory."""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScriptFit:
    """What a script passes to `fit`."""

    recipe: dict[str, Any]
    """Keys of the recipe of a job."""
    has_validation: bool
    notes: tuple[tuple[int, str], ...] = ()
    """What is not part of the job, by line."""
