"""Divides a Keras training script into functions of a job: one builds the model, others return the data.

The script is parsed, never run. Of the statements before its call of `fit`, each function gets those that its
result depends on. Imports, constants, functions and classes stay at the top level of the new module. What
cannot be taken over is named by line.
"""

import ast
import builtins
import operator
import re
import symtable
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from csdctl.errors import InputError
from csdctl.job.model import parse_python

FIT_ARGUMENTS = (
    *("x", "y", "batch_size", "epochs", "verbose", "callbacks", "validation_split", "validation_data"),
    *("shuffle", "class_weight", "sample_weight"),
)
"""The first arguments of `keras.Model.fit`, in order of position."""
TELLING = {"batch_size", "epochs", "callbacks", "validation_data", "validation_split", "steps_per_epoch"}
"""Arguments that `fit` of a scaler, a tokenizer or a clustering does not take."""
UNSUPPORTED = {
    "initial_epoch": "a run starts at epoch 0; `csdctl train --resume` continues one",
    "steps_per_epoch": "an epoch reads all samples once; `csdctl train --max-steps` ends a run early",
    "validation_freq": "the validation data is evaluated after every epoch",
    "validation_steps": "all of the validation data is evaluated",
}
BUILT_IN = {"ModelCheckpoint", "BackupAndRestore", "TerminateOnNaN", "History", "CSVLogger", "ProgbarLogger"}
"""Callbacks whose work csdctl always does."""
_STOPPING = (
    *("monitor", "min_delta", "patience", "verbose", "mode", "baseline"),
    *("restore_best_weights", "start_from_epoch"),
)
_REDUCING = ("monitor", "factor", "patience", "verbose", "mode", "min_delta", "cooldown", "min_lr")
CALLBACKS = {
    "EarlyStopping": ("early_stopping", 0, _STOPPING),
    "ReduceLROnPlateau": ("reduce_on_plateau", 10, _REDUCING),
}
"""What replaces a callback: a key of the recipe, Keras' default patience, and its arguments in order."""
OUTPUT = {"print", "pprint", "display", "summary", "plot_model", "evaluate", "predict", "show", "save"}
"""Functions that are called for what they show or write."""
PLOTTING = {"matplotlib", "seaborn", "plotly", "IPython", "pylab"}
CHANGING = {"adapt", "fit_transform", "fit_on_texts", "pop"}
"""Methods that change their object also where their result is used."""
RANDOM = (
    *("RandomFlip", "RandomRotation", "RandomZoom", "RandomCrop", "RandomTranslation", "RandomContrast"),
    *("RandomBrightness", "RandomHeight", "RandomWidth", "RandAugment", "CutMix", "MixUp", "AugMix"),
    *("random_flip", "random_crop", "random_brightness", "random_contrast", "random_hue"),
    *("random_saturation", "stateless_random_"),
)
"""Beginnings of the names of layers and functions that change images at random."""
SETTING = ("set_", "enable_", "seed")
"""Beginnings of the names of functions that set a state of their module: seeds, policies."""
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNKNOWN = object()
SPLIT = """\
    data = {data}
    end = int(len(keras.tree.flatten(data)[0]) * (1 - {share}))
    training, validation = [
        keras.tree.map_structure(lambda values: values[part], data)
        for part in (slice(end), slice(end, None))
    ]
    return training, validation"""


WRITTEN = 'written by `csdctl init`."""'
FUNCTIONS = ("build", "load", "training_data", "validation_data")


@dataclass(frozen=True)
class LiftedScript:
    """The functions of a job, as the text of a module, and the arguments of `fit` as keys of a recipe."""

    text: str
    recipe: dict[str, Any]
    has_validation: bool
    notes: tuple[tuple[int, str], ...]
    """What was not taken over, by line."""
    functions: tuple[str, ...] = FUNCTIONS
    """The names of the functions that return the model, all data, training data and validation data."""


def lift_script(path: Path, options: Sequence[str] = ()) -> LiftedScript:
    """Return model and data functions of a training script that is called with `options`.

    Raises InputError, with the line, for a script without a call of `fit` whose model and data can be found.
    """
    if path.suffix == ".ipynb":
        remedy = f"jupyter nbconvert --to script {path}, or call csdctl.Job.from_model in the notebook"
        raise InputError(f"{path} is a notebook, expected a script", remedy=remedy)
    try:
        source = path.read_text()
        module = ast.parse(source)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", remedy="pass the path of a training script") from None
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}"
        raise InputError(f"{where}: not valid Python: {error.msg}", remedy=f"fix {path}") from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {path} as Python: {getattr(error, 'strerror', None) or error}",
            remedy="pass the path of a training script",
        ) from None
    try:
        return _Script(path, source, module, options).lift()
    except SyntaxError as error:  # of a part by itself, such as a function with nonlocal
        raise InputError(
            f"{path}, line {error.lineno}: {error.msg}, when it stands alone",
            remedy="pass functions for model and data: --model and --public",
        ) from None


def trains_on_import(path: Path) -> bool:
    """Return whether a Python file calls `fit` when it is imported."""
    module = parse_python(path)
    body = module.body if module else []
    plain = [stmt for stmt in body if not isinstance(stmt, ast.FunctionDef | ast.ClassDef | ast.If)]
    return any(_is_fit(node) for stmt in plain for node in ast.walk(stmt))


@dataclass
class _Statement:
    """A statement with the names that it binds, reads and changes."""

    node: ast.stmt
    modules: Mapping[str, str]
    """Names of imported modules and of what is imported from them, with their package."""
    functions: Mapping[str, set[str]] = field(default_factory=dict)
    """Functions of the script, and the global names that they read or bind."""

    @cached_property
    def _table(self) -> symtable.SymbolTable:
        return _table_of(self.node)

    @property
    def is_definition(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)

    @cached_property
    def is_import(self) -> bool:
        plain = ast.Import | ast.ImportFrom
        parts = ast.iter_child_nodes(self.node) if isinstance(self.node, ast.Try) else [self.node]
        return all(
            isinstance(part, plain)
            or (isinstance(part, ast.ExceptHandler) and all(isinstance(one, plain) for one in part.body))
            for part in parts
        )

    @cached_property
    def binds(self) -> set[str]:
        symbols = self._table.get_symbols()
        return {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}

    @cached_property
    def late(self) -> set[str]:
        """Global names that the functions defined here read when they are called."""
        return set(_globals_of(self._table)) if self.is_definition else set()

    @cached_property
    def reads(self) -> set[str]:
        """Global names that are read when the statement runs."""
        found = {one.get_name() for one in self._table.get_symbols() if one.is_referenced()}
        return found if self.is_definition else found | set(_globals_of(self._table))

    @cached_property
    def changes(self) -> set[str]:
        """Names of objects that the statement may change without binding them."""
        found: set[str] = set()
        for node in self._nodes:
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                found.add(_root(node))
            elif isinstance(node, ast.Expr):  # for what it does: to its object, its arguments, or globals
                found |= _names_in(node.value)
                found |= set().union(*(self.functions.get(_root(one.func), ()) for one in _calls_in(node)))
            elif isinstance(node, ast.Call) and _name_of(node) in CHANGING:
                found.add(_root(node.func))
        for loop in (node for node in self._nodes if isinstance(node, ast.For)):  # over parts of an object
            found |= _names_in(loop.iter) if found & _names_in(loop.target) else set()
        return found - set(self.modules)

    @cached_property
    def is_output(self) -> bool:
        """Whether it only prints, plots, saves, evaluates, or trains."""
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        if isinstance(self.node, ast.Expr) and not calls:
            return True
        if self.is_definition or self.is_import:
            return False
        if any(map(_is_fit, calls)):
            return True
        if isinstance(self.node, ast.Expr | ast.Assign) and any(
            self.modules.get(_root(call.func)) in PLOTTING and _name_of(call) != "imread" for call in calls
        ):
            return True
        return isinstance(self.node, ast.Expr) and _name_of(self.node.value) in OUTPUT

    @cached_property
    def is_setting(self) -> bool:
        """Whether it sets a seed, a policy or the like of a module."""
        value = self.node.value if isinstance(self.node, ast.Expr) else None
        return (
            isinstance(value, ast.Call) and self._is_of_module(value) and _name_of(value).startswith(SETTING)
        )

    @cached_property
    def is_environment(self) -> bool:
        """Whether it sets a variable of the environment, or a path that later imports need."""
        text = ast.unparse(self.node)
        if isinstance(self.node, ast.Expr):
            return text.startswith(("sys.path.append(", "sys.path.insert("))
        return isinstance(self.node, ast.Assign) and "os.environ[" in ast.unparse(self.node.targets[0])

    @cached_property
    def has_effect(self) -> bool:
        """Whether it calls a function of a module for its effect: a download, a new directory."""
        effects = [node.value for node in self._nodes if isinstance(node, ast.Expr)]
        return any(isinstance(value, ast.Call) and self._is_of_module(value) for value in effects)

    def _is_of_module(self, call: ast.Call) -> bool:
        return _root(call.func) in self.modules

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        """The nodes that run with the statement, without the bodies of functions."""
        waiting: list[ast.AST] = [self.node]
        found: list[ast.AST] = []
        while waiting:
            found.append(node := waiting.pop())
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                waiting += ast.iter_child_nodes(node)
        return found


@dataclass
class _Script:
    """The script on its way to functions of a job."""

    path: Path
    source: str
    module: ast.Module
    options: Sequence[str]
    notes: list[tuple[int, str]] = field(default_factory=list)
    statements: list[_Statement] = field(default_factory=list)
    """Those that run before `fit`."""
    constants: dict[str, Any] = field(default_factory=dict)

    def lift(self) -> LiftedScript:
        """Return the functions. Raises InputError."""
        fit = self._find_fit()
        modules = dict(_modules_in(self.module))
        functions = {
            one.name: set(_globals_of(_table_of(one), only_read=False))
            for one in self.module.body
            if isinstance(one, ast.FunctionDef)
        }
        self.statements = [_Statement(node, modules, functions) for node in self._flatten(fit)]
        self._find_options()
        self._find_constants()
        arguments = self._arguments_of(fit)
        if "x" not in arguments:
            raise self._error(fit, "fit gets no data", "pass the data to fit")
        assert isinstance(fit.func, ast.Attribute)
        model, validation = fit.func.value, arguments.get("validation_data")
        data = [arguments[name] for name in ("x", "y", "sample_weight") if name in arguments]
        share = self._constant(arguments, "validation_split") if validation is None else None
        building = self._select([model])
        loading = self._select([*data, *([validation] if validation else [])], with_effects=True)
        recipe = self._recipe(arguments, [*data, *(one.node for one in loading)])
        for call in _calls_in(*(one.node for one in loading)):
            arguments_of = [str(one.arg) for one in call.keywords]
            is_random = any(one == "None" or one.endswith(("_range", "_flip")) for one in arguments_of)
            if _name_of(call).startswith(RANDOM) or (_name_of(call) == "ImageDataGenerator" and is_random):
                self._note(call, "its random changes happen once: use layers of the model, or data.augment")
        whole = ast.unparse(data[0] if len(data) == 1 else ast.Tuple(data, ast.Load()))
        other = ast.unparse(validation) if validation else "None"
        result = SPLIT.format(data=whole, share=share) if share else f"    return {whole}, {other}"
        has_validation = bool(validation or share)
        text = self._render(ast.unparse(model), result, building, loading, has_validation=has_validation)
        notes = tuple(sorted(set(self.notes)))
        return LiftedScript(text, recipe, has_validation, notes, self._functions)

    @cached_property
    def _functions(self) -> tuple[str, ...]:
        """Names for the functions that the script itself does not use."""
        used = {one.id for one in ast.walk(self.module) if isinstance(one, ast.Name)}
        used |= {one.name for one in ast.walk(self.module) if isinstance(one, ast.FunctionDef | ast.ClassDef)}
        used |= {name for name, _ in _modules_in(self.module)}
        return tuple(f"{name}_of_job" if name in used else name for name in FUNCTIONS)

    def _error(self, node: ast.AST, message: str, remedy: str) -> InputError:
        return InputError(f"{self.path}, line {getattr(node, 'lineno', 1)}: {message}", remedy=remedy)

    def _note(self, node: ast.AST, text: str) -> None:
        self.notes.append((getattr(node, "lineno", 1), text))

    def _find_fit(self) -> ast.Call:
        every = _calls_in(self.module)
        old = next((one for one in every if _name_of(one) == "fit_generator"), None)
        any_fit = [one for one in every if ast.unparse(one.func).endswith(".fit")]
        calls = list(filter(_is_fit, every)) or ([old] if old else any_fit[-1:])
        if not calls:
            remedy = "call it in this script, or pass functions for model and data: --model and --public"
            raise self._error(self.module, "no call of model.fit", remedy)
        first, *others = calls
        if first is old:
            raise self._error(first, "fit_generator is a Keras 2 method", "call fit, with the same arguments")
        for other in others:
            self._note(other, "another call of fit; only the first one is used")
        return first

    def _flatten(self, fit: ast.Call) -> list[ast.stmt]:
        """Return the statements that run before `fit`, with the functions that lead to it inlined."""
        goals: list[tuple[ast.Call, ast.FunctionDef | None]] = []
        goal: ast.Call | None = fit
        while goal:
            function = self._function_around(goal)
            goals.append((goal, function))
            goal = self._call_of(function, goal) if function and len(goals) < 10 else None
        statements: list[ast.stmt] = []
        caller: ast.Call | None = None
        for goal, function in reversed(goals):
            if function and caller:
                statements += self._bindings(function, caller)
            statements += self._before(function.body if function else self.module.body, goal)
            caller = goal
        return statements

    def _function_around(self, node: ast.AST) -> ast.FunctionDef | None:
        """Return the outermost function around a node. Raises InputError for a method."""
        around = [one for one in ast.walk(self.module) if node in ast.walk(one)]
        for one in around:
            if isinstance(one, ast.ClassDef):
                raise self._error(node, f"fit is called in a method of {one.name}", "call it in a function")
        return next((one for one in around if isinstance(one, ast.FunctionDef)), None)

    def _call_of(self, function: ast.FunctionDef, goal: ast.Call) -> ast.Call:
        """Return the first call of a function. Raises InputError where there is none."""
        inside = set(ast.walk(function))
        calls = [
            one for one in _calls_in(self.module) if _root(one.func) == function.name and one not in inside
        ]
        if not calls:
            raise self._error(
                goal,
                f"fit is called in {function.name}(), which the script never calls",
                "call it at the top level of the script, or under `if __name__`",
            )
        first, *others = calls
        for other in others:
            self._note(other, f"another call of {function.name}(); only the first one is used")
        return first

    def _before(self, body: Sequence[ast.stmt], goal: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statements of a block that run before `goal`. Blocks around it are opened."""
        for statement in body:
            holds_goal = goal in ast.walk(statement)
            if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
                yield from self._before(statement.body, goal)
            elif isinstance(statement, ast.With) and _name_of(statement.items[0].context_expr) == "scope":
                self._note(
                    statement, "the distribution strategy is left out: csdctl distributes the training"
                )
                yield from self._before(statement.body, goal)
            elif holds_goal and isinstance(statement, ast.For | ast.While):
                remedy = "call fit once, with the number of epochs"
                raise self._error(statement, "fit is called in a loop", remedy)
            elif holds_goal and isinstance(statement, ast.If):
                is_true = any(goal in ast.walk(one) for one in statement.body)
                self._note(statement, f"assumed {str(is_true).lower()}: {ast.unparse(statement.test)}")
                yield from self._before(statement.body if is_true else statement.orelse, goal)
            elif holds_goal and isinstance(statement, ast.With | ast.Try):
                yield from self._before(statement.body, goal)
            elif not holds_goal:
                yield statement
            if holds_goal:
                return

    def _bindings(self, function: ast.FunctionDef, call: ast.Call) -> Iterator[ast.stmt]:
        """Yield assignments of a call's arguments to the parameters of its function."""
        parameters = function.args
        if parameters.vararg or parameters.kwarg or any(one.arg is None for one in call.keywords):
            raise self._error(call, f"{function.name}() takes * or **", "pass its arguments by name")
        names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
        values: dict[str, ast.expr | None] = dict(
            zip(reversed(names), reversed(parameters.defaults), strict=False)
        )
        values |= {
            one.arg: value for one, value in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        }
        values |= dict(zip(names, call.args, strict=False))
        values |= {one.arg: one.value for one in call.keywords if one.arg}
        given = {
            name: value
            for name, value in values.items()
            if value and not (isinstance(value, ast.Name) and value.id == name)
        }

        def bind(name: str, value: ast.expr) -> ast.stmt:
            target = ast.Name(name, ast.Store())
            return ast.fix_missing_locations(ast.copy_location(ast.Assign([target], value), call))

        # A value may name a parameter that is bound before it: train(x[:80], x[80:]).
        if any(_names_in(value) & given.keys() - {name} for name, value in given.items()):
            yield from (bind(f"given_{name}", value) for name, value in given.items())
            given = {name: ast.Name(f"given_{name}", ast.Load()) for name in given}
        yield from (bind(name, value) for name, value in given.items())

    def _find_options(self) -> None:
        """Find the values of `argparse`'s options. Raises InputError for a required one that is missing."""
        given = " ".join(self.options).replace("=", " ").split()
        parsed = [
            one for one in self.statements if not one.is_definition and "args(" in ast.unparse(one.node)
        ]
        for call in _calls_in(self.module):
            names = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
            if _name_of(call) != "add_argument" or not names:
                continue
            more = {one.arg: one.value for one in call.keywords}
            is_positional = not names[0].startswith("-") and "nargs" not in more
            if not given and (is_positional or _evaluate(more.get("required"), {}) is True):
                remedy = f"pass the script's options: csdctl init {self.path} -- {names[-1]} VALUE"
                raise self._error(call, f"{names[-1]} is required", remedy)
            named = [given[given.index(name) + 1] for name in names if name in given[:-1]]
            value = _evaluate(named[0] if named else more.get("default"), {})
            name = max(names, key=len).lstrip("-").replace("-", "_")
            for bound in (bound for one in parsed for bound in one.binds):
                self.constants |= {f"{bound}.{name}": value, f"{bound}[{name!r}]": value}
        if parsed and not given:
            self._note(parsed[0].node, "options take their defaults; others: csdctl init SCRIPT -- OPTIONS")

    def _find_constants(self) -> None:
        """Find the names that are bound once, to a value that follows from the text alone."""
        bound = [name for one in self.statements for name in (*one.binds, *one.changes)]
        for one in self.statements:
            node = one.node
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = _evaluate(node.value, self.constants)
                if len(one.binds) == 1 and bound.count(node.targets[0].id) == 1 and value is not UNKNOWN:
                    self.constants[node.targets[0].id] = value

    def _arguments_of(self, fit: ast.Call) -> dict[str, ast.expr]:
        """Return the arguments of `fit` but those that are None."""
        found = dict(zip(FIT_ARGUMENTS, fit.args, strict=False))
        for keyword in fit.keywords:
            if keyword.arg is None:
                self._note(fit, f"**{ast.unparse(keyword.value)} of fit")
            else:
                found[keyword.arg] = keyword.value
        for name, reason in UNSUPPORTED.items():
            if name in found:
                self._note(found[name], f"{name}: {reason}")
        return {name: value for name, value in found.items() if self._last_value(value) is not None}

    def _constant(self, arguments: Mapping[str, ast.expr], name: str) -> Any:
        """Return a constant argument of `fit`, None for one that is missing or computed."""
        value = _evaluate(arguments[name], self.constants) if name in arguments else None
        if value is UNKNOWN:
            self._note(
                arguments[name], f"{name} is computed: {ast.unparse(arguments[name])}; write the number"
            )
            return None
        return value

    def _select(self, results: Sequence[ast.expr], *, with_effects: bool = False) -> list[_Statement]:
        """Return the statements that these expressions depend on."""
        needed = set().union(*map(_names_in, results))
        candidates = [one for one in self.statements if not (one.is_output or one.is_import)]
        candidates = [one for one in candidates if not self._only_shows(one, needed)]
        chosen = [one for one in candidates if one.is_setting or (with_effects and one.has_effect)]
        while True:
            for one in chosen:
                needed |= one.reads | one.late
            more = [one for one in candidates if one not in chosen and needed & (one.binds | one.changes)]
            if not more:
                return sorted(chosen, key=self.statements.index)
            chosen += more

    def _only_shows(self, block: _Statement, needed: set[str]) -> bool:
        """Return whether a loop, an if or a with only prints or plots, and binds nothing `needed` or read."""
        if not isinstance(block.node, ast.For | ast.While | ast.With | ast.If):
            return False
        needed = needed.union(*(one.reads | one.late for one in self.statements if one is not block))
        simple = (
            one for one in ast.walk(block.node) if isinstance(one, ast.stmt) and not hasattr(one, "body")
        )
        parts = [_Statement(one, block.modules, block.functions) for one in simple]
        others = [one for one in parts if not one.is_output]
        return len(others) < len(parts) and not any(
            not isinstance(one.node, ast.Assign | ast.Pass | ast.Break | ast.Continue)
            or one.changes
            or one.binds & needed
            for one in others
        )

    def _recipe(self, arguments: Mapping[str, ast.expr], loading: Sequence[ast.AST]) -> dict[str, Any]:
        """Return the arguments of `fit` as keys of the recipe."""
        size = self._constant(arguments, "batch_size") or self._batch_size(loading)
        if not size and "y" not in arguments:
            self._note(arguments["x"], "the batch size is not known: 32 is assumed for reference_batch")
        if "shuffle" in arguments and _evaluate(arguments["shuffle"], {}) is False:
            self._note(arguments["shuffle"], "shuffle=False: csdctl shuffles every epoch")
        found: dict[str, Any] = {
            "epochs": self._constant(arguments, "epochs") or 1,
            "reference_batch": size or 32,
        }
        if "class_weight" in arguments:
            weights = _evaluate(self._last_value(arguments["class_weight"]), self.constants)
            if isinstance(weights, dict):
                found["class_weight"] = {str(name): float(weight) for name, weight in weights.items()}
            else:
                written = arguments["class_weight"]
                self._note(written, "class_weight is computed: write it to recipe.class_weight")
                found["# class_weight"] = f"not converted, line {written.lineno}"
        callbacks = self._last_value(arguments.get("callbacks"))
        self._note_changes(arguments.get("callbacks"))
        self._note_changes(arguments.get("class_weight"))
        for callback in callbacks.elts if isinstance(callbacks, ast.List | ast.Tuple) else [callbacks]:
            if callback is not None:
                found |= self._callback(callback)
        return found

    def _note_changes(self, argument: ast.expr | None) -> None:
        """Note the statements that change an argument of `fit` after it was bound."""
        if not isinstance(argument, ast.Name):
            return
        for one in self.statements:
            is_added_to = isinstance(one.node, ast.AugAssign) and argument.id in one.binds
            if is_added_to or argument.id in one.changes:
                self._note(one.node, f"{argument.id} is changed: {ast.unparse(one.node)}")

    def _batch_size(self, loading: Sequence[ast.AST]) -> int | None:
        """Return the batch size of data sets that make batches themselves."""
        for call in _calls_in(*loading):
            values = [keyword.value for keyword in call.keywords if keyword.arg in ("batch_size", "batch")]
            for value in values + call.args[: _name_of(call) == "batch"]:
                size = _evaluate(value, self.constants)
                if isinstance(size, int):
                    return size
        return None

    def _last_value(self, node: ast.expr | None) -> ast.expr | None:
        """Return what a name was bound to last, None for None."""
        if isinstance(node, ast.Name):
            for one in reversed(self.statements):
                if isinstance(one.node, ast.Assign) and ast.unparse(one.node.targets[0]) == node.id:
                    return self._last_value(one.node.value)
        return None if isinstance(node, ast.Constant) and node.value is None else node

    def _callback(self, written: ast.expr) -> dict[str, Any]:
        """Return the entry of the recipe for a callback."""
        call = self._last_value(written)
        name = _name_of(call)
        if name in BUILT_IN:
            if isinstance(call, ast.Call) and any(one.arg == "monitor" for one in call.keywords):
                self._note(call, f"monitor of {name}: best.keras is by validation loss, or by early_stopping")
            return {}
        if name not in CALLBACKS or not isinstance(call, ast.Call):
            self._note(
                written, f"callback {ast.unparse(written)}: pass csdctl.train(callbacks=…) one of csdctl"
            )
            return {}
        key, patience, arguments = CALLBACKS[name]
        values: dict[str | None, Any] = {
            one: _evaluate(value, self.constants) for one, value in zip(arguments, call.args, strict=False)
        }
        values |= {one.arg: _evaluate(one.value, self.constants) for one in call.keywords}
        for argument, value in values.items():
            if argument != "verbose" and value is UNKNOWN:
                self._note(call, f"{argument} of {name}")
        if values.get("restore_best_weights") is True:
            self._note(call, f"restore_best_weights of {name}: best.keras is the model of the best epoch")
        taken = [one for one in arguments if one not in ("verbose", "restore_best_weights")]
        kept = {one: values[one] for one in taken if values.get(one, UNKNOWN) not in (UNKNOWN, None)}
        return {key: {"patience": patience} | kept}

    def _render(
        self,
        model: str,
        result: str,
        building: Sequence[_Statement],
        loading: Sequence[_Statement],
        *,
        has_validation: bool,
    ) -> str:
        top = self._top_level([*building, *loading], set(re.findall(r"\w+", f"{model} {result}")))
        late = {name for one in top for name in one.late}
        lines = [f'"""Model and data of {self.path.name}, {WRITTEN}', ""]
        texts = [self._text(one) for one in top]
        lines += [text for text in texts if text.startswith("from __future__")]
        if "__file__" in self.source:
            lines.append(f"__file__ = {str(self.path.absolute())!r}")
        lines.append("import functools")
        if not any("keras" in one.binds for one in top):
            lines.append("import keras")
        if {"argparse", "sys", "absl"} & {package for _, package in _modules_in(self.module)}:
            lines += ["import sys", f"sys.argv = {[str(self.path), *self.options]}"]
        lines += [text for text in texts if text not in lines]
        build, load, *functions = self._functions
        for signature, doc, body, end in (
            (f"{build}()", "Return the compiled model.", building, f"    return {model}"),
            (f"{load}()", "Return the training data and the validation data.", loading, result),
        ):
            inner = [one for one in body if one not in top]
            shared = {name for one in inner for name in one.binds} & (
                late | {name for one in inner for name in one.late}
            )
            cached = ["@functools.cache  # training and validation data are parts of the same data"]
            lines += ["", "", *cached * (body is loading), f"def {signature}:", f'    """{doc}"""']
            lines += [f"    global {', '.join(sorted(shared))}"] if shared else []
            lines += [*(textwrap.indent(self._text(one), "    ") for one in inner), end]
        for index, name in enumerate(functions[: 1 + has_validation]):
            lines += ["", "", f"def {name}(path):", f"    return {load}()[{index}]"]
        return "\n".join(lines) + "\n"

    def _top_level(self, used: Sequence[_Statement], returned: set[str]) -> list[_Statement]:
        """Return the statements that stay at the top level: they need nothing that a function computes.

        A name is imported if it is used or `returned`, or if the script never uses it: it may register.
        """
        available, found = {*dir(builtins), "__file__"}, []
        kept = [*used, *(one for one in self.statements if one.is_environment)]
        needed = returned.union(*(one.reads | one.late for one in kept if not one.is_import))
        anywhere = _names_in(self.module)
        for one in self.statements:
            if one.is_environment:
                is_kept = "KERAS_BACKEND" not in ast.unparse(one.node)
                if not is_kept and "tensorflow" not in ast.unparse(one.node):
                    self._note(one.node, "csdctl trains with the TensorFlow backend of Keras")
            elif one.is_import:
                is_plotting = all(one.modules.get(name) in PLOTTING for name in one.binds)
                dropped = (anywhere | (one.binds if is_plotting else set())) - needed
                is_kept = not one.binds or bool(one.binds - dropped)
                if is_kept and isinstance(one.node, ast.Import | ast.ImportFrom):
                    bound = {name.asname or name.name.partition(".")[0]: name for name in one.node.names}
                    one.node.names = [name for text, name in bound.items() if text not in dropped]
            else:
                is_constant = one.binds <= set(self.constants) and isinstance(one.node, ast.Assign)
                is_kept = one in used and (is_constant or one.is_definition)
                is_kept = is_kept and one.reads - one.binds <= available
            if is_kept:
                found.append(one)
                available |= one.binds
        return found

    def _text(self, one: _Statement) -> str:
        """Return a statement as it was written, or where its lines cannot be moved, from its tree."""
        node = one.node
        first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))])
        written = "\n".join(self.source.splitlines()[first - 1 : node.end_lineno])
        if one.is_definition and not node.col_offset:
            return f"\n\n{written}"
        text = textwrap.dedent(written)
        try:
            is_same = ast.dump(ast.parse(text)) == ast.dump(ast.Module([node], []))
        except SyntaxError:
            is_same = False
        return text if is_same and '"""' not in text else ast.unparse(node)


def _is_fit(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".fit")
    return is_call and any(one.arg in TELLING for one in getattr(node, "keywords", ()))


def _root(node: ast.AST) -> str:
    """Return the first name of `a.b[0].c`, '' if it starts with something else."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _calls_in(*nodes: ast.AST) -> list[ast.Call]:
    """Return all calls in these, by line."""
    found = [one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call)]
    return sorted(found, key=lambda call: call.lineno)


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _name_of(node: ast.AST | None) -> str:
    """Return the last name of a called function: `fit` of `model.fit(x)`, '' for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _table_of(node: ast.stmt) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(node), "script", "exec")


def _globals_of(table: symtable.SymbolTable, *, only_read: bool = True) -> Iterator[str]:
    """Yield the global names that the functions in `table` read, or also those that they bind."""
    for child in table.get_children():
        for one in child.get_symbols():
            if one.is_global() and (one.is_referenced() or not only_read):
                yield one.get_name()
        yield from _globals_of(child, only_read=only_read)


def _modules_in(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for one in node.names:
                package = one.name.partition(".")[0]
                yield one.asname or package, package
        elif isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, (node.module or "").partition(".")[0]) for one in node.names)


def _evaluate(node: ast.expr | str | None, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of constants, UNKNOWN for any other."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        return names.get(ast.unparse(node), UNKNOWN)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        sides = _evaluate(node.left, names), _evaluate(node.right, names)
        with suppress(ArithmeticError, ValueError):
            if all(isinstance(side, int | float) and abs(side) < 1e6 for side in sides):
                return OPERATORS[type(node.op)](*sides)
        return UNKNOWN
    if isinstance(node, ast.Tuple | ast.List):
        values = [_evaluate(one, names) for one in node.elts]
        return UNKNOWN if UNKNOWN in values else values
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys, values = ([_evaluate(one, names) for one in part] for part in (node.keys, node.values))
        return UNKNOWN if UNKNOWN in keys + values else dict(zip(keys, values, strict=True))
    try:
        return ast.literal_eval(node) if node else UNKNOWN
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN
