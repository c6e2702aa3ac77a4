"""Functions of a step, traced once and joined into one graph without state.

The variables of model and optimizer are arguments, and their new values are results (`keras.StatelessScope`),
so that a function changes nothing and nothing depends on the order in which operations write. The graph is
optimized here, on the host, without passes that depend on its processor.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.process.errors import WorkerError

PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""Operations that call Python."""


class CannotCompileError(WorkerError):
    """A model's step cannot run without Python; the message says what it needs."""


@contextmanager
def assigning_in_scope() -> Iterator[None]:
    """Let optimizers assign to Keras' variables, which a StatelessScope replaces, not to TensorFlow's.

    TensorFlow's optimizers differ from those of other backends only for tf.distribute.
    """
    kind = keras.src.backend.tensorflow.optimizer.TFOptimizer
    base = keras.src.optimizers.base_optimizer.BaseOptimizer
    own = [name for name in vars(kind) if name in vars(base) and not name.startswith("__")]
    replaced = {name: getattr(base, name) for name in own if name not in KEPT}
    replaced["_var_key"] = lambda optimizer, variable: variable._value._unique_id
    with mock.patch.multiple(kind, **replaced), mock.patch.object(keras.src.ops, "cond", _select):
        yield


def _select(condition: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """Return the result of one of two functions, of which both are computed; select what they assign, too.

    A condition of TensorFlow would keep the values that are assigned within it.
    """
    scope = keras.src.backend.common.stateless_scope.get_stateless_scope()
    before, results, assigned = dict(scope.state_mapping), [], []
    for function in (if_true, if_false):
        scope.state_mapping = dict(before)
        results.append(function())
        assigned.append(scope.state_mapping)
    chosen, other = assigned
    scope.state_mapping = {
        key: value if value is other[key] else tf.where(condition, value, other[key])
        for key, value in chosen.items()
    }
    return keras.tree.map_structure(lambda one, its: tf.where(condition, one, its), *results)


KEPT = ("add_variable_from_reference", "_clip_by_norm")
"""Methods of TensorFlow's optimizers that a StatelessScope does not affect."""


def in_scope(variables: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return the scope in which Keras' `variables` have these values, tensors."""
    return keras.StatelessScope(list(zip(variables, values, strict=True)), collect_losses=True)


class GraphBuilder:
    """Joins traced functions into one graph; arguments of the same name are one placeholder."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        self._placeholders: dict[str, Any] = {}
        self._outside: dict[str, str] = {}
        self.traced: dict[str, Any] = {}
        """The functions as Python's TensorFlow calls them."""
        self.functions: dict[str, tuple[list[str], list[str], list[str]]] = {}
        """Names of feeds, fetches and targets by function."""

    def add(self, name: str, code: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Trace `code`, whose positional `arguments` have these names and specs; return its FuncGraph.

        `code` returns tensors or lists of them. Raises CannotCompileError.
        """
        function = tf.function(code, autograph=False).get_concrete_function(*arguments.values())
        self.traced[name], traced = function, function.graph
        mapped = {}
        with self.graph.as_default():
            for captured, inner in traced.captures:
                mapped[inner.name] = self._constant(captured)
            own = [one for one in traced.inputs if one.name not in mapped]
            for argument, inner in zip(arguments, own, strict=True):
                mapped[inner.name] = self._placeholder(argument, arguments[argument])
            definition = traced.as_graph_def()
            for node in definition.node:  # of a function without state, the order has no effect
                node.input[:] = [one for one in node.input if not one.startswith("^")]
            wanted = [one.name for one in traced.outputs]
            wanted += [one.name for one in traced.control_outputs if one.type == "Assert"]
            found = tf.graph_util.import_graph_def(
                definition, input_map=mapped, return_elements=wanted, name=name
            )
        fetches = [one.name for one in found[: len(traced.outputs)]]
        targets = [one.name for one in found[len(traced.outputs) :]]
        self.functions[name] = (list(map("{}:0".format, arguments)), fetches, targets)
        return traced

    def _placeholder(self, name: str, spec: Any) -> Any:
        if name not in self._placeholders:
            self._placeholders[name] = tf.compat.v1.placeholder(spec.dtype, spec.shape, name=name)
        return self._placeholders[name]

    def _constant(self, captured: Any) -> Any:
        if captured.dtype == tf.resource:  # it may be read for a result that nobody uses
            name = f"outside_{len(self._outside)}"
            self._outside[name] = str(captured)
            return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], name=name)
        with tf.init_scope():
            value = captured.numpy()
        return tf.constant(value)

    def optimize(self) -> bytes:
        """Return the graph, optimized, as a serialized GraphDef."""
        from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
        from tensorflow.python.grappler import tf_optimizer

        keep = {
            name.partition(":")[0]
            for feeds, fetches, targets in self.functions.values()
            for name in (*feeds, *fetches, *targets)
        }
        config = config_pb2.ConfigProto()
        rewriting = config.graph_options.rewrite_options
        off = rewriter_config_pb2.RewriterConfig.OFF
        for part in ("remapping", "layout_optimizer", "auto_mixed_precision", "pin_to_host_optimization"):
            setattr(rewriting, part, off)  # they depend on the processor
        rewriting.meta_optimizer_timeout_ms = -1
        # A second pass takes as long as the first, and leaves 1% fewer operations.
        rewriting.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
        meta = tf.compat.v1.train.export_meta_graph(graph=self.graph, graph_def=self.graph.as_graph_def())
        meta.collection_def["train_op"].node_list.value.extend(sorted(keep))
        optimized = tf_optimizer.OptimizeGraph(config, meta)
        inner = (one for function in optimized.library.function for one in function.node_def)
        for node in (*optimized.node, *inner):
            if node.op in PYTHON_OPERATIONS:
                raise CannotCompileError(f"{node.name} calls Python ({node.op})")
        if outside := [self._outside[node.name] for node in optimized.node if node.name in self._outside]:
            raise CannotCompileError(f"a layer keeps state outside of Keras' variables: {outside[0]}")
        content: bytes = optimized.SerializeToString(deterministic=True)
        return content


class PythonTensors:
    """Tensors of Python's TensorFlow, as engine.step.TensorList."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def array(self, place: int) -> Any:
        """As of TensorList."""
        return np.asarray(self.tensors[place])

    def arrays(self) -> list[Any]:
        """As of TensorList."""
        return list(map(self.array, range(len(self))))

    def tail(self, start: int) -> "PythonTensors":
        """As of TensorList."""
        moved, self.tensors[start:] = self.tensors[start:], []
        return PythonTensors(moved)


class PythonSession:
    """Runs functions that were traced in this process, as engine.step.Session."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._traced = builder.traced

    def find(self, name: str, info: Any) -> Callable[..., PythonTensors]:
        """As of Session."""
        function = self._traced[name]

        def call(*inputs: Any) -> PythonTensors:
            flat: list[Any] = []
            for one in inputs:
                flat += one.tensors if isinstance(one, PythonTensors) else [tf.convert_to_tensor(one)]
            return PythonTensors(tf.nest.flatten(function(*flat)))

        return call

    def tensors(self, arrays: Sequence[Any]) -> PythonTensors:
        """As of Session."""
        return PythonTensors(list(map(tf.constant, arrays)))


def unflatten(vector: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the parts of a vector in the shapes of the variables."""
    parts = tf.split(vector, [math.prod(variable.shape) for variable in variables]) if variables else []
    return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]
