"""Which variables a traced function writes, and which of the new values depend on its batch."""

from collections.abc import Callable
from typing import Any

import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.interception import StepGraph

tf, _ = load_backend()


def summed(value: Any) -> Any:
    return tf.numpy_function(lambda one: one, [value], tf.float32)


WRITES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "sum over ranks": (lambda one, batch: one.assign_add(summed(tf.reduce_sum(batch))), False),
    "mean of the batch": (lambda one, batch: one.assign(0.9 * one + 0.1 * tf.reduce_mean(batch)), True),
    "size of the batch": (lambda one, batch: one.assign_add(tf.cast(tf.shape(batch)[0], tf.float32)), True),
    "condition on the batch": (
        lambda one, batch: one.assign(tf.cond(batch[0] > 0, lambda: 1.0, lambda: 2.0)),
        True,
    ),
    "counter": (lambda one, batch: one.assign_add(1.0), False),
    "set anew": (lambda one, batch: (one.assign(batch[0]), one.assign(3.0)), False),
    "in a condition": (
        lambda one, batch: tf.cond(batch[0] > 0, lambda: one.assign_add(1.0), lambda: one.assign_add(0.0)),
        True,
    ),
}


def graph_of(write: Callable[[Any, Any], Any], variable: Any, own: Any = ()) -> StepGraph:
    def step(batch: Any) -> Any:
        write(variable, batch)
        return batch

    traced = tf.function(step, autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)])
    return StepGraph(traced.get_concrete_function().graph, own)


@pytest.mark.parametrize(("write", "differs"), WRITES.values(), ids=WRITES)
def test_what_depends_on_the_batch_differs_by_rank(write: Callable[[Any, Any], Any], differs: bool) -> None:
    variable = tf.Variable(1.0)
    found = graph_of(write, variable)
    assert [one is variable for one in found.written] == [True]
    assert bool(found.differing) == differs


def test_what_is_computed_from_a_variable_that_differs_differs() -> None:
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    found = graph_of(lambda _, batch: (first.assign(batch[0]), second.assign(2 * first)), first)
    assert {id(one) for one in found.differing} == {id(first), id(second)}
    found = graph_of(lambda _, batch: second.assign(2 * first), first, {id(first.handle)})
    assert [one is second for one in found.differing] == [True]


def test_random_numbers_with_a_state_of_their_own_are_named() -> None:
    found = graph_of(lambda one, _: one.assign(tf.random.normal(())), tf.Variable(1.0))
    assert found.drawing == ["RandomStandardNormal"]
