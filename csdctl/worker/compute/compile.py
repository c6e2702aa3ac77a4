"""Compiles the step of a model that `build` wrote, for other processes or for this one."""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import DEFAULT, load_backend, tf
from csdctl.worker.compute.model import load
from csdctl.worker.compute.own_step import OwnStepCompiler, has_own_step
from csdctl.worker.compute.precision import compute_type, widen
from csdctl.worker.compute.split import SplitCompiler
from csdctl.worker.compute.step_compiler import Compiler, StepCompiler
from csdctl.worker.compute.trace import CannotCompileError, GraphBuilder
from csdctl.worker.compute.user_code import load_augmentation
from csdctl.worker.data.arrays import Array, random_batch, save_arrays
from csdctl.worker.engine.keras_file import WEIGHTS, find_places
from csdctl.worker.engine.step import BFLOAT16, StepEngine, StepInfo
from csdctl.worker.engine.tensorflow_c import GraphSession
from csdctl.worker.process.errors import InputError
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import Compiled, CompileRequest
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import VERIFY, RankSpec, RunSpec, Runtime

GRAPH, INFO, STATE_FILE = "graph.pb", "info.json", "state.npz"
"""The files of a compiled step."""
OF_RANKS = "ranks"
"""The directory with the step of the ranks that have the first part of a model."""


def compile_step(request: CompileRequest) -> Compiled:
    """Compile a step, and write it to the request's `output`. Raises WorkerError if ranks cannot take it."""
    load_backend()
    model = load(Path(request.architecture), Path(request.weights), request.code)
    model_type = compute_type(model)
    if request.is_wide:
        widen(model)
    example = random_batch(np.random.default_rng(0), request.data, 0)
    output = Path(request.output)
    compiler = make_compiler(
        model, request.recipe, example, has_noise=request.has_noise, has_validation=request.has_validation
    )
    try:
        info, builder = trace(compiler)
        if request.cut:
            parts = SplitCompiler(compiler, request.cut, example)
            info = parts.add_to(builder, info)
            of_ranks = GraphBuilder()
            write_step(parts.of_ranks, parts.describe_ranks(of_ranks, info), of_ranks, output / OF_RANKS)
        write_step(compiler, info, builder, output)
    except CannotCompileError as error:
        return Compiled(error.message)
    info = replace(info, places=write_template(compiler, output), model_type=model_type)
    (output / INFO).write_text(to_json(info))
    return Compiled()


def write_step(compiler: Compiler, info: StepInfo, builder: GraphBuilder, output: Path) -> None:
    """Write the files of a step. Raises CannotCompileError."""
    output.mkdir(exist_ok=True)
    (output / GRAPH).write_bytes(builder.optimize())
    kept = (value for value, one in zip(compiler.values, info.variables, strict=True) if not one.is_zero)
    save_arrays(output / STATE_FILE, {f"v{place:05d}": value for place, value in enumerate(kept)})
    (output / INFO).write_text(to_json(info))


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
        raise InputError(
            f"{type(model).__name__} has its own train_step: csdctl cannot clip the gradient of each sample",
            "train without data.private.noise",
        )
    return OwnStepCompiler(model, recipe, example, has_validation=has_validation)


def trace(compiler: Compiler) -> tuple[StepInfo, GraphBuilder]:
    """Trace a step. Again if its code has variables that neither model nor optimizer knows."""
    builder = GraphBuilder()
    info = compiler.trace(builder)
    of_metrics = {id(one.value) for one in compiler.metric_states.variables}  # which start anew
    if others := [one for one in builder.unknown if id(one) not in of_metrics]:
        compiler.add_state([*map(OtherVariable, others)])
        info = compiler.trace(builder := GraphBuilder())
    return info, builder


class OtherVariable:
    """A tf.Variable with the interface of Keras' variables."""

    def __init__(self, variable: Any) -> None:
        self.value, self.path = variable, variable.name
        self.shape, self.dtype = variable.shape, variable.dtype.name

    def assign(self, value: Any) -> None:
        """Give it a value."""
        self.value.assign(value)


def make_engine(
    compiler: Compiler, info: StepInfo, builder: GraphBuilder, runtime: Runtime = DEFAULT, **options: Any
) -> StepEngine:
    """Return the engine of a step that was traced here, whose operations may call Python.

    `options` as of StepEngine.
    """
    session = GraphSession(builder.optimize(has_python=True), runtime)
    return StepEngine(info, session, compiler.values, compiler.recipe.seed, **options)


def build_engine(spec: RunSpec, me: RankSpec, recipe: Recipe, example: tuple[Array, Array]) -> StepEngine:
    """Return the step of a rank whose model is traced here. `example` as of `make_compiler`."""
    model = load(Path(spec.architecture), Path(spec.weights), spec.code)
    model_type = compute_type(model)
    if spec.task.name == VERIFY:
        widen(model)
    compiler = make_compiler(
        model, recipe, example, has_noise=spec.noise is not None, has_validation=spec.validation is not None
    )
    info, builder = trace(compiler)
    if spec.split:
        parts = SplitCompiler(compiler, spec.split.cut, example)
        info = parts.add_to(builder, info)
        if me.rank:
            compiler = parts.of_ranks
            info = parts.describe_ranks(builder := GraphBuilder(), info)
    return make_engine(
        compiler,
        replace(info, model_type=model_type),
        builder,
        me.runtime,
        rank=me.rank,
        weight=me.weight,
        noise=spec.noise,
        augmentation=load_augmentation(recipe.augment, recipe.seed, spec.code),
    )


def assign(variable: Any, value: Array) -> None:
    """Give a variable of a model the value that an engine has."""
    variable.assign(tf.bitcast(value["bfloat16"], tf.bfloat16) if value.dtype == BFLOAT16 else value)


def write_template(compiler: Compiler, output: Path, seed: int = 0) -> dict[str, tuple[str, ...]]:
    """Write a file of Keras for the model, whose weights then change. Return where it has the variables.

    They are numbered as those of the compiler. Rates follow. {} if the file lacks a weight, or has it in
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
    generator = np.random.default_rng(seed)
    for variable in variables:
        kind = np.dtype(variable.dtype).kind
        if kind in "iub":
            highest = 1 if kind == "b" else np.iinfo(variable.dtype).max
            mark = generator.integers(0, highest, variable.shape, endpoint=True, dtype=np.uint64)
        else:
            mark = generator.standard_normal(variable.shape)
        variable.assign(tf.cast(mark, variable.dtype))
    marked = output / f"marked{''.join(path.suffixes)}"
    (model.save if path.suffix == ".keras" else model.save_weights)(marked)
    if path.suffix == ".keras":
        with zipfile.ZipFile(marked) as archive:
            content = archive.read(WEIGHTS)
    else:
        content = marked.read_bytes()
    marked.unlink()
    places = find_places(content, [np.asarray(variable.value) for variable in variables])
    return places if all(str(number) in places for number in range(len(model.weights))) else {}
