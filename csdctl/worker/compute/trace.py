"""Functions of a step, traced once and joined into one graph without state.

The variables of model and optimizer are arguments, and their new values are results (`Values`), so that a
function changes nothing and nothing depends on the order in which operations write. A function that needs a
sum over the ranks is cut there, into stages. The graph is optimized here, on the host, without passes that
depend on its processor.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.engine.tensorflow_c import LOAD, FunctionInfo
from csdctl.worker.process.errors import JobError, WorkerError

PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
WRITES = ("Assign", "ResourceScatter", "ResourceApply", "LookupTableInsert", "LookupTableRemove")
"""How the types of operations begin that write what no function has as an argument."""


class CannotCompileError(WorkerError):
    """A model's step cannot run without Python. The message says what it needs."""


class Values:
    """The values of variables while a function is traced, in place of those that code reads and writes."""

    def __init__(self, graph: Any) -> None:
        """`graph`: the FuncGraph that is traced."""
        self._graph, self._values = graph, dict[int, Any]()
        self.unknown: dict[int, Any] = {}
        """Variables whose value was not given, with the placeholder of it, by id."""
        self.written: dict[int, str] = {}
        """The names of all variables that were written, by id."""

    @contextmanager
    def given(self, variables: Iterable[Any], values: Iterable[Any]) -> Iterator[None]:
        """Give Keras' variables values, which are tensors. They have those from before again afterwards."""
        before, graph = self._values, tf.compat.v1.get_default_graph()
        self._values = before | {
            id(variable.value): tf.cast(value, variable.value.dtype)
            for variable, value in zip(variables, values, strict=True)
        }
        try:
            yield
            self._check(graph)
        finally:
            self._values = before

    def get(self, variable: Any) -> Any:
        """Return the value of a tf.Variable, a tensor of this graph or of one inside of it."""
        key = id(variable)
        if key not in self._values and key not in self.unknown:
            with self._graph.as_default():
                self.unknown[key] = variable, tf.compat.v1.placeholder(variable.dtype, variable.shape)
        return self._now(self._values, key)

    def set(self, variable: Any, value: Any) -> Any:
        """Give a tf.Variable a new value. Return the variable."""
        self.get(variable)  # it may be unknown
        self.written[id(variable)] = variable.name.partition(":")[0]
        value = tf.convert_to_tensor(value, dtype=variable.dtype)
        self._values[id(variable)] = tf.ensure_shape(value, variable.shape)
        return variable

    def read(self, variable: Any) -> Any:
        """Return the value, with a gradient towards the variable on all tapes, as TensorFlow's read has."""
        from tensorflow.python.eager import record
        from tensorflow.python.ops.resource_variable_ops import variable_accessed

        variable_accessed(variable)  # for tapes, which watch what is trained
        value = self.get(variable)
        with value.graph.as_default():  # a loop captures what it reads, and gradients go through that
            result = tf.identity(value)
            record.record_operation(
                "ReadVariableOp", [result], [variable.handle], lambda gradient: [gradient]
            )
        return result

    def _check(self, graph: Any) -> None:
        """Raise JobError for a variable that was written in a function that `graph` calls."""
        for key, value in self._values.items():
            if value.graph not in (graph, self._graph):
                raise JobError(
                    f"{self.written[key]} is written inside of a function of TensorFlow",
                    "write variables, and draw random numbers, outside of tf.switch_case and tf.case",
                )

    def choose(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of a condition: one that also chooses among assigned values."""

        def cond(pred: Any, true_fn: Any = None, false_fn: Any = None, *args: Any, **options: Any) -> Any:
            before, written = self._values, list[dict[int, Any]]()

            def branch(function: Callable[[], Any]) -> Any:
                result, changed = self._isolated(before, function)
                written.append(changed)
                return result

            result = original(pred, lambda: branch(true_fn), lambda: branch(false_fn), *args, **options)
            if not any(written):
                return result
            written = []  # nothing outside can use the values of a branch: both branches are computed
            results = [branch(function) for function in (true_fn, false_fn)]
            self._values = before | {
                key: tf.where(pred, *(changed.get(key, self._now(before, key)) for changed in written))
                for key in written[0] | written[1]
            }
            return keras.tree.map_structure(
                lambda true, false: None if true is None else tf.where(pred, true, false), *results
            )

        return cond

    def carry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of a loop: its variables include all that the body writes."""

        def loop(cond: Any, body: Any, loop_vars: Any, shape_invariants: Any = None, **options: Any) -> Any:
            before, written = self._values, dict[int, Any]()

            def trial(*args: Any) -> Any:
                nonlocal written
                result, written = self._isolated(before, body, *args)
                return result

            result = original(cond, trial, loop_vars, shape_invariants, **options)
            if not written:
                return result
            keys, count = list(written), len(loop_vars)
            first = [self._now(before, key) for key in keys]

            def run(function: Callable[..., Any], args: Sequence[Any]) -> Any:
                values = before | dict(zip(keys, args[count:], strict=True))
                result, changed = self._isolated(values, function, *args[:count])
                return result, [changed.get(key, values[key]) for key in keys]

            def carrying(*args: Any) -> Any:
                result, carried = run(body, args)
                rows = result if tf.nest.is_nested(result) and len(result) == count else [result]
                return [*rows, *carried]

            if shape_invariants is not None:
                shape_invariants = [*shape_invariants, *(value.shape for value in first)]
            loop_vars_and_state = [*loop_vars, *first]
            results = original(
                lambda *args: run(cond, args)[0], carrying, loop_vars_and_state, shape_invariants, **options
            )
            self._values = before | dict(zip(keys, results[count:], strict=True))
            is_single = count == 1 and not options.get("return_same_structure", True)
            rows = results[:count]
            return rows[0] if is_single else tf.nest.pack_sequence_as(loop_vars, tf.nest.flatten(rows))

        return loop

    def _isolated(self, values: dict[int, Any], function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """Return what a function returns with these values of variables, and the values that it changes."""
        before, self._values = self._values, dict(values)
        result = function(*args)
        changed = {key: new for key, new in self._values.items() if new is not self._now(values, key)}
        self._values = before
        return result, changed

    def _now(self, values: Mapping[int, Any], key: int) -> Any:
        return values[key] if key in values else self.unknown[key][1]


@contextmanager
def replacing_variables(values: Values) -> Iterator[None]:
    """Let tf.Variables read and write `values` where graphs are built."""
    from tensorflow.python.ops import cond_v2, while_v2
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable, UninitializedVariable

    def read(variable: Any, no_copy: bool = False) -> Any:
        return values.read(variable)

    def assign(variable: Any, value: Any, *_: Any, **__: Any) -> Any:
        return values.set(variable, value)

    def changing(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(variable: Any, *what: Any, **_: Any) -> Any:
            return values.set(variable, change(values.get(variable), *what))

        return call

    def of_slices(change: Callable[..., Any]) -> Callable[..., Any]:
        return changing(lambda value, delta, *_: change(value, delta.indices[:, None], delta.values))

    add, sub, update = (getattr(tf, f"tensor_scatter_nd_{name}") for name in ("add", "sub", "update"))
    replaced: dict[str, Callable[..., Any]] = {
        "_read_variable_op": read,
        "sparse_read": lambda variable, indices, name=None: tf.gather(values.read(variable), indices),
        "gather_nd": lambda variable, indices, name=None: tf.gather_nd(values.read(variable), indices),
        "assign": assign,
        "assign_add": changing(lambda value, delta, *_: value + tf.cast(delta, value.dtype)),
        "assign_sub": changing(lambda value, delta, *_: value - tf.cast(delta, value.dtype)),
        "scatter_add": of_slices(add),
        "scatter_sub": of_slices(sub),
        "scatter_update": of_slices(update),
        "scatter_max": of_slices(tf.tensor_scatter_nd_max),
        "scatter_min": of_slices(tf.tensor_scatter_nd_min),
        "scatter_nd_add": changing(add),
        "scatter_nd_sub": changing(sub),
        "scatter_nd_update": changing(update),
    }

    def in_graphs(kind: Any, name: str) -> Callable[..., Any]:
        original, replacement = getattr(kind, name), replaced[name]

        def call(variable: Any, *args: Any, **options: Any) -> Any:
            return (original if tf.executing_eagerly() else replacement)(variable, *args, **options)

        return call

    with ExitStack() as stack:
        stack.enter_context(running_functions_inline())
        for kind, name in itertools.product((ResourceVariable, UninitializedVariable), replaced):
            stack.enter_context(mock.patch.object(kind, name, in_graphs(kind, name)))
        stack.enter_context(mock.patch.object(cond_v2, "cond_v2", values.choose(cond_v2.cond_v2)))
        stack.enter_context(mock.patch.object(while_v2, "while_loop", values.carry(while_v2.while_loop)))
        yield


@contextmanager
def running_functions_inline() -> Iterator[None]:
    """Run a tf.function in the graph that calls it: one traced before read the variables themselves."""
    from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status
    from tensorflow.python.eager.polymorphic_function.autograph_util import py_func_from_autograph
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    original = Function.__call__

    def call(function: Any, *args: Any, **options: Any) -> Any:
        if tf.executing_eagerly():
            return original(function, *args, **options)
        code = function.python_function
        if not function._autograph:
            return code(*args, **options)
        with ControlStatusCtx(Status.ENABLED):
            return py_func_from_autograph(code)(*args, **options)

    with mock.patch.object(Function, "__call__", call):
        yield


class GraphBuilder:
    """Joins traced functions into one graph. Arguments of the same name are one placeholder."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        self._placeholders: dict[str, Any] = {}
        self._outside: dict[str, str] = {}
        self._tables: dict[int, tuple[Any, Any]] = {}
        self.functions: dict[str, FunctionInfo] = {}
        self.unknown: list[Any] = []
        """Variables that functions write, and that are none of their arguments, as tf.Variables."""
        self._cuts: list[tuple[list[Any], list[Any]]] = []
        """Of the function that is traced: what each cut gives, and the placeholders of what it receives."""

    def cut(self, gives: Sequence[Any], receives: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Cut the function that is traced. Return what it receives there, tensors of these (dtype, shape).

        Operations after the cut that need them belong to the next stage.
        """
        received = [tf.compat.v1.placeholder(dtype, shape) for dtype, shape in receives]
        self._cuts.append(([*map(tf.identity, gives)], received))
        return received

    def add(self, names: Sequence[str], code: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Trace `code`, whose positional `arguments`, after `Values`, have these names and specs.

        `code` returns tensors or lists of them. `names` has one for each of its stages, or one and a format
        for all, such as "own_{}". A stage takes the arguments, then, for each stage before it, what that cut
        receives and what that stage keeps for others. It returns what its cut gives, or the result, and then
        what it keeps. Returns the tensors of the result, as they were traced. Raises CannotCompileError.
        """

        def call(*given: Any) -> Any:
            self._cuts = []  # TensorFlow may trace again
            values = Values(tf.compat.v1.get_default_graph())
            with replacing_variables(values):
                result = code(values, *given)
            self._values = values
            return result

        function = tf.function(call, autograph=False).get_concrete_function(*arguments.values())
        traced, unknown = function.graph, self._values.unknown.values()
        for operation in traced.get_operations():
            if operation.type.startswith(WRITES):
                raise JobError(
                    f"{operation.name} writes a variable or a table by {operation.type}",
                    "use assign, assign_add or assign_sub of the variable",
                )
        values = {inner.name: variable.numpy() for variable, inner in unknown}
        with self.graph.as_default():
            mapped = {inner.name: self._constant(captured) for captured, inner in traced.captures}
            inputs = [inner for inner in traced.inputs if inner.name not in mapped]
            for (name, spec), inner in zip(arguments.items(), inputs, strict=True):
                mapped[inner.name] = self._placeholder(name, spec)
            mapped |= {name: tf.constant(value) for name, value in values.items()}
            self._add_stages(names, traced, mapped, [f"{argument}:0" for argument in arguments])
        new = self._values.written.keys() - set(map(id, self.unknown))
        self.unknown += [variable for variable, _ in unknown if id(variable) in new]
        return traced.outputs

    def _add_stages(
        self, names: Sequence[str], traced: Any, mapped: dict[str, Any], feeds: list[str]
    ) -> None:
        """Add the stages of a traced function to the graph, each with only what it needs."""
        definition = traced.as_graph_def()
        for node in definition.node:  # of a function without state, the order has no effect
            node.input[:] = [name for name in node.input if not name.startswith("^")]
            node.attr.pop("_class", None)  # it names the placeholders of variables
        results = [[tensor.name for tensor in gives] for gives, _ in self._cuts]
        results.append([tensor.name for tensor in traced.outputs])
        effects = self._find_effects(traced, definition)
        stages = _divide(
            definition, [[*part, *effect] for part, effect in zip(results, effects, strict=True)]
        )
        for number, (stage, targets) in enumerate(zip(stages, effects, strict=True)):
            name = names[min(number, len(names) - 1)].format(number)
            tensors = [*results[number], *stage.kept]
            elements = tf.graph_util.import_graph_def(
                stage.extract(definition),
                input_map={key: value for key, value in mapped.items() if key in stage.inputs},
                return_elements=[*tensors, *targets],
                name=name,
            )
            fetched, operations = elements[: len(tensors)], elements[len(tensors) :]
            self.functions[name] = FunctionInfo(
                tuple(feeds), *(tuple(element.name for element in part) for part in (fetched, operations))
            )
            received = self._cuts[number][1] if number < len(self._cuts) else []
            passed = [*received, *map(traced.get_tensor_by_name, stage.kept)]
            for place, tensor in enumerate(passed):
                mapped[tensor.name] = self._placeholder(f"{name}_passes_{place}", tensor)
                feeds.append(mapped[tensor.name].name)

    def _find_effects(self, traced: Any, definition: Any) -> list[list[str]]:
        """Return assertions and calls of Python by stage. They run even if nothing uses their result."""
        places = {operation.name: place for place, operation in enumerate(traced.get_operations())}
        cuts = [places[gives[0].op.name] for gives, _ in self._cuts]
        library = {function.signature.name: function.node_def for function in definition.library.function}
        nodes = {node.name: node for node in definition.node}

        def calls_python(node: Any) -> bool:
            called = (value.func.name for value in node.attr.values() if value.HasField("func"))
            inner = (inner for name in called for inner in library.get(name, ()))
            return node.op in PYTHON_OPERATIONS or any(map(calls_python, inner))

        effects: list[list[str]] = [[] for _ in range(len(cuts) + 1)]
        for operation in traced.control_outputs:
            is_assertion = operation.type == "Assert" or "AssertGuard" in operation.name
            if is_assertion or calls_python(nodes[operation.name]):
                stage = len(cuts) if is_assertion else sum(places[operation.name] > cut for cut in cuts)
                effects[stage].append(operation.name)
        return effects

    def _placeholder(self, name: str, spec: Any) -> Any:
        if name not in self._placeholders:
            self._placeholders[name] = tf.compat.v1.placeholder(spec.dtype, spec.shape, name=name)
        return self._placeholders[name]

    def _constant(self, captured: Any) -> Any:
        if captured.dtype != tf.resource:
            return tf.constant(captured.numpy())
        kind = tf.lookup.experimental.DenseHashTable.__mro__[1]
        for table in gc.get_objects():
            if isinstance(table, kind) and table.resource_handle is captured:
                return self._copy_table(table)
        name = f"outside_{len(self._outside)}"  # it may be read for a result that nobody uses
        self._outside[name] = str(captured)
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], name=name)

    def _copy_table(self, table: Any) -> Any:
        """Return the handle of a table in the graph with the content of a lookup table, once it is loaded."""
        if id(table) not in self._tables:
            with tf.init_scope():
                keys, values = (content.numpy() for content in run_eagerly(table.export))
            number = len(self._tables)
            types = {"key_dtype": table.key_dtype, "value_dtype": table.value_dtype}
            handle = tf.raw_ops.HashTableV2(shared_name=f"table_{number}", name=f"table_{number}", **types)
            fill = tf.raw_ops.LookupTableImportV2(
                table_handle=handle,
                keys=tf.constant(keys, table.key_dtype),
                values=tf.constant(values, table.value_dtype),
                name=f"fill_{number}",
            )
            self._tables[id(table)] = table, handle
            before = self.functions.get(LOAD, FunctionInfo((), ()))
            self.functions[LOAD] = FunctionInfo((), (), (*before.targets, fill.name))
        return self._tables[id(table)][1]

    def optimize(self, *, has_python: bool = False) -> bytes:
        """Return the graph, optimized and serialized. Raises CannotCompileError if it calls Python."""
        from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
        from tensorflow.python.grappler import tf_optimizer

        keep = {
            name.partition(":")[0]
            for info in self.functions.values()
            for name in (*info.feeds, *info.fetches, *info.targets)
        }
        config = config_pb2.ConfigProto()
        rewriting = config.graph_options.rewrite_options
        off = rewriter_config_pb2.RewriterConfig.OFF
        for part in ("remapping", "layout_optimizer", "auto_mixed_precision", "pin_to_host_optimization"):
            setattr(rewriting, part, off)  # they depend on the processor
        # It merges functions of keras.ops.scan that are not equal: the graph cannot be imported.
        rewriting.common_subgraph_elimination = off
        rewriting.meta_optimizer_timeout_ms = -1
        # A second pass takes as long as the first, and leaves 1% fewer operations.
        rewriting.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
        meta = tf.compat.v1.train.export_meta_graph(graph=self.graph, graph_def=self.graph.as_graph_def())
        meta.collection_def["train_op"].node_list.value.extend(sorted(keep))
        optimized = tf_optimizer.OptimizeGraph(config, meta)
        inner = (node for function in optimized.library.function for node in function.node_def)
        for node in () if has_python else (*optimized.node, *inner):
            if node.op in PYTHON_OPERATIONS:
                raise CannotCompileError(f"{node.name} calls Python ({node.op})")
        if outside := [self._outside[node.name] for node in optimized.node if node.name in self._outside]:
            raise CannotCompileError(f"a layer keeps state outside of variables: {outside[0]}")
        content: bytes = optimized.SerializeToString(deterministic=True)
        return content


@dataclass
class _Stage:
    """The nodes of a stage of a function, the tensors that it takes, and what it keeps for later stages."""

    members: set[str]
    inputs: set[str]
    kept: list[str] = field(default_factory=list)

    def extract(self, definition: Any) -> Any:
        """Return the definition of the nodes of the stage, and the placeholders that it takes."""
        inputs = {tensor.partition(":")[0] for tensor in self.inputs}
        part = type(definition)(versions=definition.versions, library=definition.library)
        for node in definition.node:
            if node.name in self.members:
                part.node.append(node)
            elif node.name in inputs:  # its own inputs are not here
                placeholder = part.node.add(name=node.name, op="Placeholder")
                placeholder.attr["dtype"].type = tf.float32.as_datatype_enum
        return part


def _divide(definition: Any, results: Sequence[Sequence[str]]) -> list[_Stage]:
    """Return the stages of a function, given the tensors or operations that each of them results in."""
    nodes = {node.name: node for node in definition.node}
    stages: list[_Stage] = []
    owners: dict[str, _Stage] = {}
    for names in results:
        stage, waiting = _Stage(set(), set()), list(names)
        while waiting:
            tensor = waiting.pop()
            name = tensor.partition(":")[0]
            node = nodes[name]
            if node.op == "Placeholder" or (name in owners and node.op != "Const"):
                stage.inputs.add(tensor if ":" in tensor else f"{tensor}:0")
            elif name not in stage.members:
                stage.members.add(name)
                waiting += node.input
        owners = dict.fromkeys(stage.members, stage) | owners
        stages.append(stage)
    for tensor in sorted(set().union(*(stage.inputs for stage in stages))):
        if owner := owners.get(tensor.partition(":")[0]):
            owner.kept.append(tensor)
    return stages


def run_eagerly(code: Callable[[], Any]) -> Any:
    """Return what `code` returns outside of the graph that is being built: graphs belong to their thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(code).result()


def unflatten(vector: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the parts of a vector in the shapes of the variables."""
    parts = tf.split(vector, [math.prod(variable.shape) for variable in variables]) if variables else []
    return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]
