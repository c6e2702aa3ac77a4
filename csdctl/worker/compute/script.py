"""Runs a training script up to its call of `fit`, for the functions that `csdctl init` writes.

`fit` does not train: what it is called with becomes the model, the data and the recipe of a job.
"""

import argparse
import ast
import gc
import hashlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from csdctl.worker.compute.backend import keras, load_backend, tf
from csdctl.worker.compute.keras_internals import flatten_layers
from csdctl.worker.compute.user_code import explaining
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.model_info import ScriptFit, ScriptRequest

UNSUPPORTED = {
    "initial_epoch": "a run starts at epoch 0; `csdctl train --resume` continues one",
    "steps_per_epoch": "an epoch reads all samples once; `csdctl train --max-steps` ends a run early",
    "validation_freq": "the validation data is evaluated after every epoch",
    "validation_steps": "all of the validation data is evaluated",
}
"""Arguments of `fit` that csdctl does not have, and what it does instead."""
BUILT_IN = {"ModelCheckpoint", "BackupAndRestore", "TerminateOnNaN", "History", "CSVLogger", "ProgbarLogger"}
"""Callbacks of Keras whose work csdctl always does."""
CALLBACKS = {"EarlyStopping": "early_stopping", "ReduceLROnPlateau": "reduce_on_plateau"}
"""The key of the recipe that replaces a callback of Keras, with the same defaults but for `patience`."""
IGNORED = {"self", "verbose", "restore_best_weights"}
"""Arguments of these callbacks that a recipe does not have."""
RANDOM_LAYERS = ("Random", "RandAugment", "CutMix", "MixUp", "AugMix")
"""Beginnings of the names of layers that change images at random."""
NOTED_LINES = {
    r"tf\.distribute\.\w*Strategy\(": "without its distribution strategy: csdctl distributes the training",
    r"random_(flip|crop|brightness|contrast|hue|saturation)|stateless_random_|_range=|_flip=": (
        "its random changes happen once: use layers of the model, or data.augment"
    ),
}
"""Patterns of lines that do not become part of the job, and why."""


class FitCall(BaseException):
    """What a script passed to `fit`. Its methods are the functions of a job.

    It is raised to end the script, whatever errors that handles.
    """

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        """`arguments`: those that are not None, by name."""
        super().__init__("fit was called")
        self.model, self.arguments, self.line = model, arguments, 1

    def build(self) -> Any:
        """Return the compiled model."""
        return self.model

    def training_data(self, path: str = "") -> Any:
        """Return the data to train on: x, (x, y) or (x, y, sample_weight)."""
        return self._data[0]

    def validation_data(self, path: str = "") -> Any:
        """Return the validation data, or None."""
        return self._data[1]

    @cached_property
    def _data(self) -> tuple[Any, Any]:
        names = ("x", "y", "sample_weight")
        parts = [self.arguments[name] for name in names if name in self.arguments]
        data = tuple(parts) if len(parts) > 1 else parts[0]
        share = self.arguments.get("validation_split")
        if "validation_data" in self.arguments or not share:
            return data, self.arguments.get("validation_data")
        end = int(len(keras.tree.flatten(data)[0]) * (1 - share))
        training = keras.tree.map_structure(lambda values: values[:end], data)
        return training, keras.tree.map_structure(lambda values: values[end:], data)


def run_to_fit(script: str, options: Sequence[str], names: dict[str, Any], sha256: str = "") -> FitCall:
    """Run a script with command-line `options` up to its first call of `fit`, and return that call.

    `script`: a path relative to the current directory. `names`: the names of the calling module. It gets the
    classes and functions of the script, with which Keras loads the model again. `sha256`: of the script when
    the job was written. Raises WorkerError, exit code 2, if the script has changed since, fails, or ends
    without a call of `fit`.
    """
    if "tensorflow" not in sys.modules:
        load_backend()
    path = Path(script)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JobError(
            f"{path.absolute()} cannot be read: {error.strerror}", "run csdctl where the script is"
        ) from None
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        raise JobError(f"{script} has changed since `csdctl init`", f"run `csdctl init {script} --force`")
    sys.path.insert(0, str(path.absolute().parent))
    namespace = {"__name__": names["__name__"], "__file__": str(path.absolute())}
    call: FitCall | None = None
    with explaining(f"{script} fails", f"fix {script}: it must run up to its call of fit", path):
        # The module has a name of its own, so that Keras finds its classes.
        code = compile(re.sub(rb"\b__name__\s*==", b"'__main__' ==", content), script, "exec")
        try:
            with _recording(script, options):
                exec(code, namespace)
        except FitCall as raised:
            frames = traceback.extract_tb(raised.__traceback__)
            call = raised.with_traceback(None)
            call.line = next(frame.lineno for frame in reversed(frames) if frame.filename == script) or 1
    if call is None:
        raise JobError(
            f"{script}: no call of model.fit",
            "call it in this script, or pass functions for model and data: --model and --public",
        )
    if "x" not in call.arguments:
        raise JobError(f"{script}, line {call.line}: fit gets no data", "pass the data to fit")
    names |= {
        name: value for name, value in namespace.items() if inspect.isroutine(value) or inspect.isclass(value)
    }
    return call


def _recording(script: str, options: Sequence[str]) -> ExitStack:
    """Return a context in which `fit` raises FitCall, and scripts find what they expect."""

    def fit(model: Any, *given: Any, **named: Any) -> None:
        arguments = dict(zip(parameters, given, strict=False)) | named
        raise FitCall(model, {name: value for name, value in arguments.items() if value is not None})

    def refuse(parser: argparse.ArgumentParser, message: str) -> None:
        raise JobError(message, f"pass the script's options: csdctl init {script} -- OPTIONS")

    get_strategy = tf.distribute.get_strategy  # of one process
    parameters = list(inspect.signature(keras.Model.fit).parameters)[1:]
    stack = ExitStack()
    stack.enter_context(mock.patch.object(keras.Model, "fit", fit))
    stack.enter_context(mock.patch.object(keras.utils, "plot_model"))
    stack.enter_context(mock.patch.object(sys, "argv", [script, *options]))
    stack.enter_context(mock.patch.object(argparse.ArgumentParser, "error", refuse))
    stack.enter_context(mock.patch.dict(os.environ, {"MPLBACKEND": "Agg"}))
    for module in (tf.distribute, tf.distribute.experimental):
        for name in [name for name in dir(module) if name.endswith("Strategy") and name != "Strategy"]:
            strategy = type(name, (getattr(module, name),), {"__new__": lambda *_, **__: get_strategy()})
            stack.enter_context(mock.patch.object(module, name, strategy))
    return stack


def record(request: ScriptRequest) -> ScriptFit:
    """Return what a script passes to `fit`. Raises WorkerError as `run_to_fit` does."""
    call = run_to_fit(request.script, request.options, vars(ModuleType("script")))
    recipe, notes = describe_fit(call)
    source = Path(request.script).read_text(errors="replace")
    notes += _note_lines(call, source, has_options=bool(request.options))
    return ScriptFit(recipe, call.validation_data() is not None, tuple(sorted(set(notes))))


def describe_fit(call: FitCall) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Return the recipe of a call of `fit`, and notes on what is not part of it, with their line."""
    arguments = call.arguments
    notes = [f"{name}: {reason}" for name, reason in UNSUPPORTED.items() if name in arguments]
    if arguments.get("shuffle") is False:
        notes.append("shuffle=False: csdctl shuffles every epoch")
    batch_size = arguments.get("batch_size") or _batch_size_of(arguments["x"])
    if not batch_size and "y" not in arguments:
        notes.append("the batch size is not known: 32 is assumed for reference_batch")
    recipe: dict[str, Any] = {
        "epochs": int(arguments.get("epochs", 1)),
        "reference_batch": int(batch_size or 32),
    }
    if weights := arguments.get("class_weight"):
        recipe["class_weight"] = {str(label): float(weight) for label, weight in weights.items()}
    callbacks = arguments.get("callbacks", [])
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        entry, callback_notes = _describe_callback(callback, call.model)
        recipe |= entry
        notes += callback_notes
    return recipe, [(call.line, note) for note in notes]


def _batch_size_of(data: Any) -> int | None:
    """Return the size of the first batch of data sets that make batches, None for arrays and generators."""
    with suppress(Exception):  # of the user's classes
        if hasattr(data, "element_spec"):
            return len(keras.tree.flatten(next(iter(data)))[0])
        if isinstance(data, keras.utils.PyDataset):
            return len(keras.tree.flatten(data[0])[0])
    return None


def _describe_callback(callback: Any, model: Any) -> tuple[dict[str, Any], list[str]]:
    name = type(callback).__name__
    if type(callback) is not getattr(keras.callbacks, name, None) or name not in {*BUILT_IN, *CALLBACKS}:
        return {}, [f"callback {name}: pass csdctl.train(callbacks=…) one of csdctl"]
    if name in BUILT_IN:
        note = f"monitor of {name}: best.keras is by validation loss, or by early_stopping"
        return {}, [] if getattr(callback, "monitor", "val_loss") == "val_loss" else [note]
    notes = []
    if getattr(callback, "restore_best_weights", False):
        notes.append(f"restore_best_weights of {name}: best.keras is the model of the best epoch")
    entry: dict[str, Any] = {"patience": int(callback.patience)}
    for argument, parameter in inspect.signature(type(callback).__init__).parameters.items():
        value = getattr(callback, argument, parameter.default)
        if value != parameter.default and argument not in IGNORED:
            entry[argument] = getattr(value, "item", lambda value=value: value)()
    if lowest := entry.pop("min_lr", 0):
        entry["min_factor"] = float(f"{min(1.0, lowest / float(model.optimizer.learning_rate)):.6g}")
    return {CALLBACKS[name]: entry}, notes


def _note_lines(call: FitCall, source: str, *, has_options: bool) -> Iterator[tuple[int, str]]:
    """Yield notes from the text of a script, and on layers outside its model, with their lines."""
    for number, line in enumerate(source.splitlines(), 1):
        if number > call.line and ".fit(" in line:
            yield number, "another call of fit; only the first one is used"
        elif number < call.line and not has_options and re.search(r"\.parse(_known)?_args\(\)", line):
            yield number, "options take their defaults; others: csdctl init SCRIPT -- OPTIONS"
        elif number < call.line:
            yield from ((number, text) for pattern, text in NOTED_LINES.items() if re.search(pattern, line))
    for loop in ast.walk(ast.parse(source)):
        if isinstance(loop, ast.For | ast.While) and loop.lineno < call.line <= (loop.end_lineno or 0):
            yield loop.lineno, "fit is called in a loop; only its first call is used: set recipe.epochs"
    in_model = set(map(id, flatten_layers(call.model)))
    for layer in (value for value in gc.get_objects() if isinstance(value, keras.Layer)):
        if type(layer).__name__.startswith(RANDOM_LAYERS) and id(layer) not in in_model:
            what = f"{type(layer).__name__} is not in the model: its random changes happen once"
            yield call.line, f"{what}; make it a layer of the model, or use data.augment"
