"""Models: built and compiled on the host, transferred as JSON and weights, loaded on every rank.

A user's file is opened on the host (`build`). Nodes receive the architecture as JSON, with loss, optimizer
and metrics, and the weights as .npz, read with `allow_pickle=False`. Classes and functions that Keras lacks
are in the job's code, which is sent only when the model needs it. A model that Keras cannot rebuild from its
configuration is built on every rank as on the host, by the user's function.
"""

import inspect
import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import numpy as np

from csdctl.worker.compute import keras_internals as internals
from csdctl.worker.compute import user_code
from csdctl.worker.compute.backend import apply_settings, keras, keras_settings, load_backend, load_settings
from csdctl.worker.compute.cuts import NoCutError, count_flops, find_cuts, frozen_cut, split_at
from csdctl.worker.compute.own_step import has_own_step
from csdctl.worker.compute.recipe import compile_model, is_own, name_of
from csdctl.worker.data.arrays import save_arrays
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.process.errors import JobError, WorkerError, describe
from csdctl.worker.protocol import model_info
from csdctl.worker.protocol.datasets import as_inputs
from csdctl.worker.protocol.durable_files import replacing_by_name
from csdctl.worker.protocol.json_codec import from_dict, to_json
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import UserCode

COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
"""The arguments of compile() that training depends on."""


def build(request: model_info.BuildRequest) -> model_info.ModelInfo:
    """Build and compile a model, and write it to the request's `output`. Raises WorkerError, exit code 2."""
    spec, output = request.spec, Path(request.output)
    reference, recipe = spec.reference, spec.recipe
    load_backend()
    load_settings(Path(spec.directory))
    keras.utils.set_random_seed(recipe.seed)  # for what files draw when they are imported
    user_code.import_roots(spec.code_roots)
    keras.utils.set_random_seed(recipe.seed)
    model = _find(spec)
    if not isinstance(model, keras.Model):
        raise JobError(f"{reference} returned a {type(model).__name__}, expected a Keras model")
    has_step = has_own_step(model)
    if not _is_built(model):
        if not spec.sample_shapes:
            losses = [term.name for term in recipe.losses.values()] or [name_of(_loss_of(model, None))]
            outputs = tuple(model_info.OutputInfo("", (), "", name, is_known=False) for name in losses)
            return model_info.ModelInfo(reference, {}, 0, 0, outputs=outputs, is_built=False)
        _build_by_call(model, spec)
    if not model.trainable_variables:
        raise JobError(f"{reference}: the model has no trainable variables")
    layers, scaling = internals.flatten_layers(model), (keras.layers.Rescaling, keras.layers.Normalization)
    if any(getattr(layer, "stateful", False) for layer in layers):
        problem = "a layer has stateful=True, and other ranks have the samples of its last batch"
        raise JobError(f"{reference}: {problem}", "use stateful=False, with a whole sequence in a sample")
    compiled = describe_compile(model)
    resolved = _compile(model, recipe)
    needs_code, architecture = _to_json(model, spec)
    (output / "architecture.json").write_text(with_settings(architecture))
    save_weights(output / "weights.npz", model.get_weights())
    features, no_features = _write_parts(model, architecture, output)
    # A tensor may have another name than the key that fit() takes it by.
    inputs, structure = getattr(model, "inputs", None) or [], getattr(model, "input", None)
    by_name = {tensor.name if len(inputs) > 1 else "": tensor for tensor in inputs}
    by_name = structure if isinstance(structure, dict) else by_name
    shapes = {name: _shape(tensor) for name, tensor in by_name.items()}
    integers = {name: tensor.dtype for name, tensor in by_name.items() if "int" in tensor.dtype}
    return model_info.ModelInfo(
        name=reference,
        inputs=shapes or {name: tuple(shape) for name, (_, shape) in spec.sample_shapes.items()},
        max_inputs={name: np.iinfo(dtype).max for name, dtype in integers.items()},
        num_parameters=sum(math.prod(variable.shape) for variable in model.weights),
        num_trainable=sum(math.prod(variable.shape) for variable in model.trainable_variables),
        num_operations=0 if has_step else count_flops(model),
        has_own_step=has_step,
        stateful_layers=find_stateful_layers(model),
        outputs=_describe_outputs(model),
        recipe=resolved,
        needs_code=needs_code,
        compiled=compiled,
        has_16_bits="16" in internals.compute_type(model),
        scaling_layers=tuple(_describe_layer(layer) for layer in layers if isinstance(layer, scaling)),
        features=features,
        no_features=no_features,
        cuts=() if has_step else tuple(cut.describe() for cut in find_cuts(model)),
    )


def describe_compile(model: Any) -> model_info.OwnCompile | None:
    """Return what `model` was compiled with, None if it was not."""
    compiled = internals.compile_arguments(model)
    if not compiled:
        return None
    # One, several, or by output.
    metrics = keras.tree.flatten([compiled.get("metrics"), compiled.get("weighted_metrics")])
    names = tuple(name_of(metric) for metric in metrics if metric is not None)
    optimizer = keras.optimizers.get(compiled.get("optimizer"))
    if optimizer is None:
        return model_info.OwnCompile("", 0.0, "", names)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a model with float16
    rate, schedule = optimizer.get_config()["learning_rate"], ""
    if isinstance(rate, dict):
        schedule = str(rate.get("class_name", ""))
        rate = optimizer.learning_rate  # the first
    rate = float(f"{float(rate):.7g}")  # as it was written: Keras keeps a float32
    return model_info.OwnCompile(type(optimizer).__name__, rate, schedule, names)


def _describe_layer(layer: Any) -> str:
    return f"{layer.name} ({type(layer).__name__})"


def _compile(model: Any, recipe: Recipe) -> Recipe:
    """Compile `model` by the recipe, unless it has a train_step and a compile() of its own."""
    if not has_own_step(model):
        return compile_model(model, recipe)
    named = {
        "optimizer": recipe.optimizer,
        "loss": recipe.losses,
        "metrics": recipe.metrics,
        "class_weight": recipe.class_weight,
        "freeze.until": recipe.freeze_until,
    }
    if wrong := [name for name, value in named.items() if value]:
        raise JobError(
            f"{type(model).__name__} has its own train_step, which recipe.{wrong[0]} cannot change",
            "pass it to compile() in the function that builds the model",
        )
    optimizers = internals.find_optimizers(model)
    is_compiled = type(model).compile is keras.Model.compile and model.compiled
    if is_compiled and any(optimizer is model.optimizer for optimizer in optimizers):
        return compile_model(model, recipe)
    rates = [rate for rate in map(internals.constant_rate, optimizers) if rate]
    if recipe.learning_rate is None and not optimizers:
        raise JobError(
            f"{type(model).__name__} has no Keras optimizer as an attribute, and its step uses none",
            "keep the optimizer as an attribute of the model, or set recipe.learning_rate",
        )
    if recipe.learning_rate is None:
        recipe = replace(recipe, learning_rate=rates[0] if rates else 1.0)
    elif len(rates) > 1:
        raise JobError(
            f"{type(model).__name__} has {len(rates)} optimizers, and recipe.learning_rate is for one",
            "pass the learning rates to the optimizers, where the model is compiled",
        )
    return recipe


def _write_parts(model: Any, architecture: str, output: Path) -> tuple[model_info.FeatureInfo | None, str]:
    """Write the model's frozen prefix and its head. Return what is known of them, or why there are none."""
    if has_own_step(model):
        return None, "has its own train_step"
    if model_info.BUILDER in json.loads(architecture):
        return None, "cannot be rebuilt from its configuration"
    try:
        cut = frozen_cut(model)
        prefix, head = split_at(cut)
        # The state of the head's optimizer becomes that of the whole model's, in this order.
        if list(map(id, head.trainable_variables)) != list(map(id, model.trainable_variables)):
            raise NoCutError("has trainable weights in a different order than its head")
        head.compile(**internals.compile_arguments(model))
        texts = [part.to_json() for part in (prefix, head)]
    except NoCutError as error:
        return None, str(error)
    except Exception as error:  # the whole model can be trained all the same
        return None, f"cannot be divided: {describe(error)}"
    for name, part, text in zip(("prefix", "head"), (prefix, head), texts, strict=True):
        (output / f"{name}.json").write_text(with_settings(text))
        save_weights(output / f"{name}.npz", part.get_weights())
    places = {id(variable): number for number, variable in enumerate(model.weights)}
    head_weights = tuple(places[id(variable)] for variable in head.weights)
    return model_info.FeatureInfo(cut.layer, _shape(cut.tensor), head_weights), ""


def with_settings(architecture: str) -> str:
    """Return the architecture with the Keras settings of this process, which is the host's."""
    return json.dumps({model_info.SETTINGS: keras_settings(), **json.loads(architecture)})


def find_stateful_layers(model: Any) -> tuple[str, ...]:
    """Return names of the layers that keep state of their samples, or state that may not be constant."""
    names = []
    for layer in internals.flatten_layers(model):
        is_constant = isinstance(layer, keras.layers.Normalization) or (
            isinstance(layer, keras.layers.BatchNormalization) and not layer.trainable
        )
        if internals.non_trainable_state(layer) and not is_constant:
            names.append(_describe_layer(layer))
    return tuple(names)


def load(architecture: Path, weights: Path, code: UserCode | None = None) -> Any:
    """Return the compiled model that `build` wrote. Raises WorkerError if that is not possible here."""
    for file in (architecture, weights, *([code.archive] if code else [])):
        check_stored(str(file))
    objects = user_code.import_packed(code.archive, code.modules) if code else {}
    try:
        text = architecture.read_text()
        with keras.saving.custom_object_scope(objects):
            content = json.loads(text)
            apply_settings(**content[model_info.SETTINGS])
            if builder := content.get(model_info.BUILDER):
                model = _build_again(from_dict(model_info.BuildSpec, builder))
            else:
                model = _from_json(text, is_trusted=bool(objects))
        model.set_weights(load_weights(weights))
        for layer in internals.flatten_layers(model):
            if isinstance(layer, keras.layers.Normalization):  # this derives what it computes with
                layer.finalize_state()
    except WorkerError:
        raise
    except OSError as error:
        raise WorkerError(f"the model cannot be read: {error}", remedy="run `csdctl deploy` again") from None
    except Exception as error:
        if missing := user_code.missing_packages(text):
            raise JobError(
                f"has no {', '.join(missing)}, which the model needs",
                "install it on all machines; if it is your own, list it in `code` of job.yaml",
            ) from None
        raise JobError(
            f"the model cannot be built here: {describe(error).partition(' Full object config:')[0]}",
            "use the same Keras version on all machines, and list the model's own code in job.yaml",
        ) from None
    return model


def _from_json(text: str, *, is_trusted: bool) -> Any:
    """Return the compiled model. `is_trusted`: its lambdas may run, like the user's code."""
    content = json.loads(text)
    with _reviving():
        model = keras.saving.deserialize_keras_object(content, safe_mode=not is_trusted)
    _revive(model, content, is_trusted=is_trusted)
    return model


@contextmanager
def _reviving() -> Iterator[None]:
    """Let constructors of the user's models get objects, such as other models, not their configurations."""
    original = keras.Model.from_config.__func__

    def from_config(kind: Any, config: dict[str, Any], custom_objects: Any = None) -> Any:
        if "layers" not in config:
            config = {
                name: keras.saving.deserialize_keras_object(value) if isinstance(value, dict) else value
                for name, value in config.items()
            }
        return original(kind, config, custom_objects)

    with mock.patch.object(keras.Model, "from_config", classmethod(from_config)):
        yield


def _revive(model: Any, content: dict[str, Any], *, is_trusted: bool) -> None:
    """Call a compile() of the model's own class with the saved arguments that it takes: Keras does not.

    The model's constructor may have called it. The arguments in `content` are saved with the model again.
    """
    kind, base, compiled = type(model), keras.Model, content.get("compile_config")
    if kind.get_config is base.get_config:  # by default, with arguments that its constructor may not take
        model.get_config = lambda: content["config"]
    if (
        not compiled
        or kind.compile is base.compile
        or kind.compile_from_config is not base.compile_from_config
    ):
        return
    arguments = keras.saving.deserialize_keras_object(compiled, safe_mode=not is_trusted)
    parameters = inspect.signature(model.compile).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = [name for name in arguments if name in parameters or (takes_any and name in COMPILED)]
    model.compile(**{name: arguments[name] for name in names})
    model.get_compile_config = lambda: compiled


def _build_again(spec: model_info.BuildSpec) -> Any:
    keras.utils.set_random_seed(spec.recipe.seed)
    model = _find(spec)
    if not _is_built(model):
        _build_by_call(model, spec)
    _compile(model, spec.recipe)
    return model


def save_weights(path: Path, weights: list[Any]) -> None:
    """Write arrays, bfloat16 as float32, so that the file has its name only once it is on the disk."""
    arrays = map(np.asarray, weights)
    kept = (array.astype("f4") if array.dtype.kind == "V" else array for array in arrays)
    save_arrays(path, {f"w{number:05d}": array for number, array in enumerate(kept)})


def load_weights(path: Path) -> list[Any]:
    """Return the arrays that `save_weights` wrote, in order."""
    with np.load(path, allow_pickle=False) as archive:
        return [archive[name] for name in sorted(archive.files)]


def save_model(model: Any, path: Path, comment: str = "") -> Path:
    """Save `model` to `path` with `comment`, or its weights beside it if Keras cannot. Return the path."""
    try:
        with replacing_by_name(path) as partial:
            model.save(partial)
            if zipfile.is_zipfile(partial):  # a class may save itself in another form
                with zipfile.ZipFile(partial, "a") as archive:
                    archive.comment = comment.encode()
    except OSError:
        raise
    except Exception as error:  # of the user's classes
        path = path.with_suffix(".weights.h5")
        print(f"only the weights are saved: {describe(error)}", flush=True)
        model.built = True  # it has been trained, though its own train_step may never call it
        with replacing_by_name(path) as partial:
            model.save_weights(partial)
    return path


def _find(spec: model_info.BuildSpec) -> Any:
    reference, arguments = spec.reference, spec.arguments
    place, _, name = reference.partition(":")
    if reference.endswith(".keras"):
        return _load_file(spec)
    if place == "keras.applications":
        function = getattr(keras.applications, name, None)
        if not callable(function):
            raise JobError(f"keras.applications has no model {name!r}")
    else:
        function = user_code.load_function(reference)
    file = Path(reference.rpartition(":")[0])
    with user_code.explaining(f"{reference}({json.dumps(arguments)}) fails", file=file):
        model = function(**arguments)
    if spec.step:
        _set_step(model, spec.step)
    return model


def _set_step(model: Any, reference: str) -> None:
    """Let a function step(model, batch) of the user's take the place of train_step. Raises JobError."""
    function = user_code.load_function(reference)
    function = getattr(function, "python_function", function)  # of a tf.function
    try:
        inspect.signature(function).bind(model, None)
    except TypeError:
        raise JobError(
            f"{reference} takes {inspect.signature(function)}, expected (model, batch)",
            "define step(model, batch), which applies gradients and returns a dict of numbers",
        ) from None
    model.train_step = MethodType(function, model)


def _is_named(file: Path, spec: model_info.BuildSpec) -> bool:
    return any(file.is_relative_to(Path(root).resolve()) for root in spec.code_roots)


def _find_named(spec: model_info.BuildSpec) -> dict[str, Any]:
    return user_code.find_objects(lambda file: _is_named(Path(file), spec))


def _load_file(spec: model_info.BuildSpec) -> Any:
    """Return the model of a .keras file, which is data: it finds only the code that the job names."""
    try:
        with keras.saving.custom_object_scope(_find_named(spec)), _reviving():
            model = keras.models.load_model(spec.reference, compile=True, safe_mode=True)
            with zipfile.ZipFile(spec.reference) as archive:
                _revive(model, json.loads(archive.read("config.json")), is_trusted=False)
            return model
    except Exception as error:
        raise JobError(
            f"{spec.reference} is not a model that can be loaded safely: {describe(error)}",
            "list the files with its own layers, losses and metrics, no lambdas, in `code` of job.yaml",
        ) from None


def _is_built(model: Any) -> bool:
    """Return whether all variables exist. A model with its own train_step need not be called itself."""
    is_built = bool(model.built) or has_own_step(model)
    return is_built and all(layer.built for layer in internals.flatten_layers(model))


def _build_by_call(model: Any, spec: model_info.BuildSpec) -> None:
    samples = {name: np.zeros((2, *shape), dtype) for name, (dtype, shape) in spec.sample_shapes.items()}
    with user_code.explaining(f"calling {spec.reference}'s model fails"):
        model(as_inputs(samples))


def _to_json(model: Any, spec: model_info.BuildSpec) -> tuple[bool, str]:
    """Return whether the nodes need the job's code, and the model as JSON. Raises WorkerError."""
    reference = spec.reference
    if has_own_step(model) and is_own(reference):
        # Its configuration rarely has what its own __init__ and compile() take.
        return True, _describe_builder(spec)
    for layer in internals.flatten_layers(model):
        if getattr(layer, "input_vocabulary", "") is None:
            raise JobError(
                f"{reference}: the vocabulary that {layer.name} was adapted to is not in its configuration",
                "create it with vocabulary=…, which get_vocabulary() returns after adapt()",
            )
    try:
        text: str = model.to_json()
    except Exception as error:
        return True, _describe_builder(spec, error)
    registered = dict(keras.saving.get_custom_objects())
    keras.saving.get_custom_objects().clear()
    try:  # first as on a node without the user's code
        _check_rebuilt(model, text, is_trusted=False)
        return False, text
    except Exception as error:
        reason = describe(error)
    finally:
        keras.saving.get_custom_objects().update(registered)
    if not spec.code_roots:
        raise JobError(
            f"{reference}: cannot be rebuilt on the nodes: {reason}",
            "list the files of its own layers, losses and metrics in `code` of job.yaml",
        )
    _check_named(spec)
    try:
        with keras.saving.custom_object_scope(_find_named(spec)):
            _check_rebuilt(model, text, is_trusted=True)
        return True, text
    except Exception as error:
        return True, _describe_builder(spec, error)


def _check_rebuilt(model: Any, text: str, *, is_trusted: bool) -> None:
    """Raise an error if a model cannot be rebuilt from its JSON `text`, or if anything of it is lost."""
    if lost := model_info.find_unsaved(model, _from_json(text, is_trusted=is_trusted)):
        raise ValueError(lost)


def _describe_builder(spec: model_info.BuildSpec, error: Exception | None = None) -> str:
    """Return, as JSON, how ranks build the model by the user's function. `error`: why. Raises JobError."""
    if error and not is_own(spec.reference):
        raise JobError(
            f"{spec.reference}: cannot be rebuilt from its configuration: {describe(error)}",
            "give its own layers get_config(), and list their files in `code` of job.yaml",
        ) from None
    _check_named(spec)
    return json.dumps({model_info.BUILDER: json.loads(to_json(spec))})


def _check_named(spec: model_info.BuildSpec) -> None:
    """Raise WorkerError if the model imported files of the user's that the nodes would not get."""
    missing = [file for file in user_code.imported_beside(Path(spec.directory)) if not _is_named(file, spec)]
    if missing:
        names = ", ".join(str(file.relative_to(Path(spec.directory).resolve())) for file in missing[:5])
        raise JobError(
            f"{spec.reference} imports {names}, which the nodes would not have",
            f"add to job.yaml: code: [{names}]",
        )


def _describe_outputs(model: Any) -> tuple[model_info.OutputInfo, ...]:
    """Return the outputs in the model's order. Of a subclassed model nothing is known before it is called."""
    outputs = getattr(model, "outputs", None)
    if not outputs:
        return (model_info.OutputInfo("", (), "", name_of(_loss_of(model, None)), is_known=False),)
    names = list(model.output_names) if len(outputs) > 1 else [""]
    layers = {layer.name: layer for layer in model.layers}
    losses = [_loss_of(model, name or None) for name in names]
    return tuple(
        model_info.OutputInfo(
            name,
            _shape(tensor),
            _activation(model.layers[-1] if len(outputs) == 1 else layers.get(name)),
            name_of(loss),
            from_logits=bool(getattr(loss, "from_logits", False)),
            ignores_class=getattr(loss, "ignore_class", None) is not None,
        )
        for name, tensor, loss in zip(names, outputs, losses, strict=True)
    )


def _loss_of(model: Any, output: str | None) -> Any:
    loss = getattr(model, "loss", None)
    if isinstance(loss, dict):
        loss = loss.get(output)
    elif isinstance(loss, list | tuple):
        names = list(getattr(model, "output_names", None) or ())
        loss = loss[names.index(output)] if output in names and len(loss) == len(names) else None
    return keras.losses.get(loss) if isinstance(loss, str) else loss


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of one sample, with 0 for dimensions of variable size."""
    return tuple(size or 0 for size in tensor.shape[1:])


def _activation(layer: Any) -> str:
    if type(layer).__name__ == "Softmax":
        return "softmax"
    return str(getattr(getattr(layer, "activation", None), "__name__", ""))
