"""Functions without state: what code reads, writes and differentiates while it is traced; stages."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.trace import CannotCompileError, GraphBuilder, Values
from csdctl.worker.engine.tensorflow_c import GraphSession
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.run_spec import Runtime

tf, keras = load_backend()
SCALAR = tf.TensorSpec((), tf.float32)


def run(code: Callable[[Values, Any, Any], Any], variable: Any, *values: float) -> list[float]:
    """Return what code returns of (values, x, the new value) with the variable at the first of `values`."""
    builder = GraphBuilder()

    def call(scope: Values, value: Any, given: Any) -> Any:
        with scope.given([variable], [value]):
            result = code(scope, variable, given)
            return [tf.cast(result, tf.float32), scope.get(variable.value)]

    builder.add(("f",), call, {"value": SCALAR, "given": SCALAR})
    session = GraphSession(builder.optimize(), Runtime())
    function = session.find("f", builder.functions["f"])
    return [float(one) for one in function(*(np.array(one, np.float32) for one in values)).arrays()]


def slope(scope: Values, variable: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        y = x * variable * variable
    return tape.gradient(y, variable)


def slope_in_a_loop(scope: Values, variable: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        y = tf.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y * variable), (tf.constant(0), x))[1]
    return tape.gradient(y, variable)


def slope_after_a_write(scope: Values, variable: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        y = x * variable
        variable.assign_add(1.0)
        y += variable * variable
    return tape.gradient(y, variable)


def chosen(scope: Values, variable: Any, x: Any) -> Any:
    tf.cond(x > 1.0, lambda: variable.assign_add(x), lambda: variable.assign(0.0 * variable))
    return variable * 2.0


def sliced(scope: Values, variable: Any, x: Any) -> Any:
    variable.value.assign(tf.gather(tf.reshape(variable, [1]), 0) + x)
    return keras.ops.add(variable, 1.0)


def written_in_a_loop(scope: Values, variable: Any, x: Any) -> Any:
    def body(number: Any, total: Any) -> Any:
        variable.assign(variable * 0.5)
        tf.cond(number > 1, lambda: variable.assign_add(1.0), lambda: variable.value)
        return number + 1, total + variable

    return tf.while_loop(lambda n, _: tf.cast(n, tf.float32) < variable, body, (tf.constant(0), x))[1]


def written_while_mapping(scope: Values, variable: Any, x: Any) -> Any:
    return tf.reduce_sum(tf.map_fn(lambda one: one * variable.assign_add(1.0), tf.stack([x, x, x])))


def of_a_tf_function(scope: Values, variable: Any, x: Any) -> Any:
    @tf.function
    def triple(value: Any) -> Any:
        if value > 1.0:  # AutoGraph makes a condition of it
            variable.assign_add(value)
        return variable * 3.0

    return triple(x)


CASES: dict[str, tuple[Callable[[Values, Any, Any], Any], list[float], list[float]]] = {
    "gradient": (slope, [3.0, 2.0], [12.0, 3.0]),
    "gradient through a loop": (slope_in_a_loop, [2.0, 5.0], [60.0, 2.0]),
    "gradient after a write": (slope_after_a_write, [2.0, 5.0], [11.0, 3.0]),
    "condition, true": (chosen, [3.0, 2.0], [10.0, 5.0]),
    "condition, false": (chosen, [3.0, 0.5], [0.0, 0.0]),
    "write in a loop": (written_in_a_loop, [16.0, 1.0], [16.0, 3.0]),
    "write in a function that is mapped": (written_while_mapping, [3.0, 2.0], [30.0, 6.0]),
    "condition of a tf.function, true": (of_a_tf_function, [3.0, 2.0], [15.0, 5.0]),
    "condition of a tf.function, false": (of_a_tf_function, [3.0, 0.5], [9.0, 3.0]),
    "TensorFlow's and Keras' interface": (sliced, [3.0, 2.0], [6.0, 5.0]),
}


@pytest.mark.parametrize(("code", "values", "expected"), CASES.values(), ids=CASES)
def test_function_computes_what_eager_code_does_and_changes_nothing(
    code: Any, values: list[float], expected: list[float]
) -> None:
    variable = keras.Variable(7.0)
    assert run(code, variable, *values) == pytest.approx(expected)
    assert float(variable) == 7.0
    eager = keras.Variable(values[0])
    found = float(code(None, eager, tf.constant(values[1])))
    assert [found, float(eager)] == pytest.approx(expected)


def switched(scope: Values, variable: Any, x: Any) -> Any:
    return tf.switch_case(tf.cast(x, tf.int32), [lambda: variable.assign_add(1.0) * 1.0, lambda: x])


def written_by_an_operation(scope: Values, variable: Any, x: Any) -> Any:
    tf.raw_ops.AssignAddVariableOp(resource=variable.value.handle, value=x)
    return x


@pytest.mark.parametrize(
    ("code", "words"),
    [(switched, "inside of a function of TensorFlow"), (written_by_an_operation, "AssignAddVariableOp")],
)
def test_write_that_would_be_lost_is_refused(code: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        run(code, keras.Variable(7.0), 1.0, 2.0)


def test_stages_of_a_function_take_what_comes_behind_their_cut() -> None:
    """Each sum is computed from what the one before has come back as; nothing is computed twice."""
    builder, calls = GraphBuilder(), list[int]()

    def count(value: Any) -> Any:
        calls.append(1)
        return value

    def code(scope: Values, x: Any) -> Any:
        y = tf.numpy_function(count, [x * 2], tf.float32)
        y.set_shape(())
        (first,) = builder.cut([y + 1], [(tf.float32, ())])
        (second,) = builder.cut([first * y], [(tf.float32, ())])
        return [first + second + y]

    builder.add(("stage_{}",), code, {"x": SCALAR})
    with pytest.raises(CannotCompileError, match="calls Python"):
        builder.optimize()
    session = GraphSession(builder.optimize(has_python=True), Runtime())
    stages = [session.find(f"stage_{number}", builder.functions[f"stage_{number}"]) for number in range(3)]
    inputs: list[Any] = [np.array(3, np.float32)]
    given = []
    for total in (10.0, 100.0):
        results = stages[len(given)](*inputs)
        given.append(float(results.array(0)))
        inputs += [np.array(total, np.float32), results.tail(1)]
    assert given == [7.0, 60.0]
    assert float(stages[2](*inputs).array(0)) == 116.0
    assert calls == [1]


def test_python_is_called_in_the_stage_where_it_stands_even_if_nothing_uses_the_result() -> None:
    builder, calls = GraphBuilder(), list[str]()

    def note(name: str) -> Any:
        return tf.numpy_function(lambda: (calls.append(name), np.float32(0))[1], [], tf.float32)

    def code(scope: Values, x: Any) -> Any:
        note("before")
        (y,) = builder.cut([x], [(tf.float32, ())])
        tf.cond(x > 1, lambda: note("between"), lambda: 0.0)
        (z,) = builder.cut([y + x], [(tf.float32, ())])
        tf.function(note)("after")
        return [y + z]

    builder.add(("stage_{}",), code, {"x": SCALAR})
    session = GraphSession(builder.optimize(has_python=True), Runtime())
    x, y, z = (np.array(value, np.float32) for value in (2, 3, 4))
    for number, inputs in enumerate(([x], [x, y], [x, y, z])):
        session.find(f"stage_{number}", builder.functions[f"stage_{number}"])(*inputs)
        assert calls == ["before", "between", "after"][: number + 1]
