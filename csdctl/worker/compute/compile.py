"""Compiles steps and forward passes of a model that `build` wrote, for other processes or for this one."""

import functools
import gc
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import DEFAULT, keras, load_backend, tf
from csdctl.worker.compute.keras_internals import compute_type, topological_nodes, widen
from csdctl.worker.compute.model import load, save_model
from csdctl.worker.compute.objective import as_tensors, inputs_of, specs_of
from csdctl.worker.compute.own_step import OwnStepCompiler, has_own_step
from csdctl.worker.compute.split import SplitCompiler
from csdctl.worker.compute.step_compiler import Compiler, StepCompiler
from csdctl.worker.compute.trace import CannotCompileError, GraphBuilder, Values
from csdctl.worker.compute.user_code import load_augmentation
from csdctl.worker.data.arrays import Array, dtype_from_text, random_batch, save_arrays
from csdctl.worker.engine.forward import BATCH_SIZE, FORWARD, Compute
from csdctl.worker.engine.keras_file import WEIGHTS, find_places
from csdctl.worker.engine.step import GraphInfo, StepEngine, StepInfo, VariableInfo
from csdctl.worker.engine.tensorflow_c import BFLOAT16, GraphSession
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import Compiled, CompileRequest, CompileRequests
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import VERIFY, HeadSpec, Prefix, RankSpec, RunSpec, Runtime

GRAPH, INFO, STATE_FILE = "graph.pb", "info.json", "state.npz"
"""The files of a compiled step."""
OF_RANKS = "ranks"
"""The directory with the step of the ranks that have the first part of a model."""
MAX_CONSTANT_BYTES = 1 << 27
"""Weights up to this size are constants of the graph: those of batch norm become a part of convolutions'.
Larger ones are arguments, for a graph is in memory three times while it is loaded."""


def compile_all(work: CompileRequests) -> Compiled:
    """Compile forward passes and steps. Raises WorkerError if ranks cannot take a step."""
    load_backend()
    gc.disable()  # nothing is freed, and it would visit the growing graphs again and again
    return Compiled(
        tuple((compile_forward if request.is_forward else compile_step)(request) for request in work.requests)
    )


def compile_step(request: CompileRequest) -> str:
    """Compile a step, and write it to the request's `output`. Return why it cannot be compiled, or ''.

    Raises WorkerError if ranks cannot take it.
    """
    if not all(request.data.sample_shape):  # of a head whose features are only known by computing them
        return "the size of its samples is not fixed"
    model = load(Path(request.architecture), Path(request.weights), request.code)
    example = random_batch(np.random.default_rng(0), request.data, 0)
    output = Path(request.output)
    try:
        steps = trace_all(
            model,
            request.recipe,
            example,
            cut=request.cut,
            is_wide=request.is_wide,
            has_noise=request.has_noise,
            has_validation=request.has_validation,
        )
        for (compiler, info, builder), directory in zip(steps, (output, output / OF_RANKS), strict=False):
            write_graph(builder, info, compiler.values, directory)
    except CannotCompileError as error:
        return error.message
    compiler, info, _ = steps[0]
    (output / INFO).write_text(to_json(replace(info, places=write_template(compiler, output))))
    return ""


def write_graph(builder: GraphBuilder, info: GraphInfo, values: Iterable[Any], output: Path) -> None:
    """Write the files of a graph, and the values of its variables. Raises CannotCompileError."""
    output.mkdir(exist_ok=True)
    (output / GRAPH).write_bytes(builder.optimize())
    pairs = zip(values, info.variables, strict=True)
    kept = (value for value, variable in pairs if not variable.is_zero)
    save_arrays(output / STATE_FILE, {f"v{place:05d}": value for place, value in enumerate(kept)})
    (output / INFO).write_text(to_json(info))


def trace_all(
    model: Any, recipe: Recipe, example: tuple[Array, Array], *, cut: str, is_wide: bool, **options: bool
) -> list[tuple[Compiler, StepInfo, GraphBuilder]]:
    """Trace the step of a model and, if it is cut after the layer `cut`, the step of its prefix.

    `is_wide`: see CompileRequest. `options`: see `make_compiler`.
    """
    model_type = compute_type(model)
    if is_wide:
        widen(model)
    compiler = make_compiler(model, recipe, example, **options)
    info, builder = trace(compiler)
    info = replace(info, model_type=model_type)
    if not cut:
        return [(compiler, info, builder)]
    parts, of_ranks = SplitCompiler(compiler, cut, example), GraphBuilder()
    info = parts.add_to(builder, info)
    info_of_ranks = replace(parts.of_ranks.trace(of_ranks), split=info.split)
    return [(compiler, info, builder), (parts.of_ranks, info_of_ranks, of_ranks)]


def make_compiler(
    model: Any,
    recipe: Recipe,
    example: tuple[Array, Array],
    *,
    has_noise: bool = False,
    has_validation: bool = False,
) -> Compiler:
    """Return what compiles the step of a compiled model, which may have a train_step of its own.

    `example`: samples and labels (n, …) as the data has them. N may be 0. Raises WorkerError, exit code 2.
    """
    if not has_own_step(model):
        return StepCompiler(model, recipe, example, has_noise=has_noise)
    if has_noise:
        raise JobError(
            f"{type(model).__name__} has its own train_step: csdctl cannot clip the gradient of each sample",
            "train without data.private.noise",
        )
    return OwnStepCompiler(model, recipe, example, has_validation=has_validation)


def trace(compiler: Compiler) -> tuple[StepInfo, GraphBuilder]:
    """Trace a step. Again if its code has variables that neither model nor optimizer knows."""
    builder = GraphBuilder()
    info = compiler.trace(builder)
    of_metrics = {id(variable.value) for variable in compiler.metric_states.variables}  # which start anew
    if variables := [variable for variable in builder.unknown if id(variable) not in of_metrics]:
        compiler.add_state([*map(LayerVariable, variables)])
        info = compiler.trace(builder := GraphBuilder())
    return info, builder


class LayerVariable:
    """A tf.Variable of a layer, with the interface of Keras' variables."""

    def __init__(self, variable: Any) -> None:
        self.value, self.path = variable, variable.name
        self.shape, self.dtype = variable.shape, variable.dtype.name

    def assign(self, value: Any) -> None:
        """Give it a value."""
        self.value.assign(value)  # by the method that it has now, which may be replaced


def make_engine(
    compiler: Compiler, info: StepInfo, builder: GraphBuilder, runtime: Runtime = DEFAULT, **options: Any
) -> StepEngine:
    """Return the engine of a step traced here, whose operations may call Python. `options`: of StepEngine."""
    session = GraphSession(builder.optimize(has_python=True), runtime)
    return StepEngine(info, session, compiler.values, compiler.recipe.seed, **options)


def build_engine(spec: RunSpec, me: RankSpec, recipe: Recipe, example: tuple[Array, Array]) -> StepEngine:
    """Return the step of a rank whose model is traced here. `example`: see `make_compiler`."""
    model = load(Path(spec.architecture), Path(spec.weights), spec.code)
    steps = trace_all(
        model,
        recipe,
        example,
        cut=spec.split.cut if spec.split else "",
        is_wide=spec.task.name == VERIFY,
        has_noise=spec.noise is not None,
        has_validation=spec.validation is not None,
    )
    return make_engine(
        *steps[-1 if me.rank else 0],
        me.runtime,
        rank=me.rank,
        weight=me.weight,
        noise=spec.noise,
        augmentation=load_augmentation(recipe.augment, recipe.seed, spec.code),
    )


def assign(variable: Any, value: Array) -> None:
    """Give a variable of a model the value that an engine has."""
    variable.assign(tf.bitcast(value["bfloat16"], tf.bfloat16) if value.dtype == BFLOAT16 else value)


def write_template(compiler: Compiler, output: Path) -> dict[str, tuple[str, ...]]:
    """Write a file of Keras for the model, whose weights then change. Return where it has the variables.

    They are numbered as the compiler numbers them. Rates follow. {} if the file lacks a weight, or has it in
    another form. The file is .keras, or .weights.h5 for a model that Keras cannot save.
    """
    model, variables = compiler.model, [*compiler.variables, *compiler.rates]
    path = output / "template.keras"
    try:
        model.save(path)
    except Exception:  # of the user's classes
        path.unlink(missing_ok=True)
        path = output / "template.weights.h5"
        model.built = True
        model.save_weights(path)
    generator = np.random.default_rng(0)
    for variable in variables:
        kind = np.dtype(variable.dtype).kind
        if kind in "iub":
            highest = 1 if kind == "b" else np.iinfo(variable.dtype).max
            mark = generator.integers(0, highest, variable.shape, endpoint=True, dtype=np.uint64)
        else:
            mark = generator.standard_normal(variable.shape)
        variable.assign(tf.cast(mark, variable.dtype))
    marked = output / f"marked{''.join(path.suffixes)}"
    if path.suffix == ".keras":
        model.save(marked)
        with zipfile.ZipFile(marked) as archive:
            content = archive.read(WEIGHTS)
    else:
        model.save_weights(marked)
        content = marked.read_bytes()
    marked.unlink()
    places = find_places(content, [np.asarray(variable.value) for variable in variables])
    return places if all(str(number) in places for number in range(len(model.weights))) else {}


def compile_forward(request: CompileRequest) -> str:
    """Compile a forward pass, and write it to the request's `output`. Return why it cannot be, or ''.

    Raises WorkerError as `load`.
    """
    model = load(Path(request.architecture), Path(request.weights), request.code)
    builder, computed = GraphBuilder(), _up_to(model, request.layer)
    values = [np.asarray(variable.value) for variable in computed.weights]
    arguments = values if sum(value.nbytes for value in values) > MAX_CONSTANT_BYTES else []
    empty = np.empty((BATCH_SIZE, *request.data.sample_shape), dtype_from_text(request.data.dtype))
    input_range = request.recipe.input_range
    (samples,) = specs_of([empty], BATCH_SIZE)
    fields = samples if isinstance(samples, dict) else {"": samples}

    def forward(scope: Values, *tensors: Any) -> list[Any]:
        state = tensors[: len(arguments)] or list(map(tf.constant, values))
        batch = dict(zip(fields, tensors[len(arguments) :], strict=True))
        with scope.given(computed.weights, state):
            inputs = inputs_of(model, batch if isinstance(samples, dict) else batch[""], input_range)
            outputs = keras.tree.flatten(computed(inputs, training=False))
            return [tf.cast(output, tf.float32) for output in outputs]

    specs = {f"state_{at}": tf.TensorSpec(value.shape, value.dtype) for at, value in enumerate(arguments)}
    specs |= {f"samples_{place}": spec for place, spec in enumerate(fields.values())}
    try:
        builder.add((FORWARD,), forward, specs)
        if builder.unknown:
            raise CannotCompileError(f"a layer has a variable of its own: {builder.unknown[0].name}")
        variables = tuple(VariableInfo(value.shape, value.dtype.name) for value in arguments)
        write_graph(builder, GraphInfo(builder.functions, variables), arguments, Path(request.output))
    except CannotCompileError as error:
        return error.message
    return ""


def keras_pass(part: Prefix, layer: str, runtime: Runtime) -> Compute:
    """Return what computes a batch with Keras. Raises WorkerError if the model cannot be built here."""
    load_backend(runtime)
    model = load(Path(part.architecture), Path(part.weights), part.code)
    computed = _up_to(model, layer)

    def forward(samples: Any) -> Any:
        outputs = computed(inputs_of(model, samples, part.input_range), training=False)
        return keras.tree.flatten(outputs)

    graph = tf.function(forward, autograph=False, reduce_retracing=True)
    return lambda samples: list(map(np.asarray, graph(as_tensors(samples))))


def _up_to(model: Any, layer: str) -> Any:
    if not layer:
        return model
    nodes = topological_nodes(model) if getattr(model, "inputs", None) else []
    for operation, node in reversed(nodes):
        if operation.name == layer and len(node.output_tensors) == 1:
            return keras.Model(model.inputs, node.output_tensors[0])
    raise JobError(
        f"the model's graph has no layer {layer} with one output", "name one of its layers with --layer"
    )


@functools.lru_cache(maxsize=1)  # to build it takes longer than to save it, and the best epochs do both
def _load_whole(spec: HeadSpec) -> Any:
    return load(Path(spec.architecture), Path(spec.weights), spec.prefix.code)


def assemble(spec: HeadSpec, head: Any) -> Any:
    """Return the whole model, the same object each time, with the weights and optimizer's state of `head`."""
    model = _load_whole(spec)
    for place, variable in zip(spec.head_weights, head.weights, strict=True):
        model.weights[place].assign(variable.value)
    model.optimizer.build(model.trainable_variables)
    for target, variable in zip(model.optimizer.variables, head.optimizer.variables, strict=True):
        target.assign(variable.value)
    return model


def save_with_keras(
    spec: RunSpec, example: tuple[Array, Array], values: Sequence[Array], path: Path, comment: str = ""
) -> Path:
    """Save a run's model with the values of its state, then of its rates. Return the path. Raises OSError."""
    model = load(Path(spec.architecture), Path(spec.weights), spec.code)
    compiler = make_compiler(model, spec.recipe, example)
    rates = compiler.rates
    variables = zip(compiler.variables, values, strict=False)
    for variable, value in [*variables, *zip(rates, values[len(values) - len(rates) :], strict=True)]:
        assign(variable, value)
    return save_model(assemble(spec.head, model) if spec.head else model, path, comment)
