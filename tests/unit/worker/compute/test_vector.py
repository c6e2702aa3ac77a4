"""The layout of the vector that the ranks sum."""

from dataclasses import replace

import numpy as np
import pytest

from csdctl.worker.compute.step import VectorLayout

STEP = VectorLayout(num_gradients=7, num_statistics=4, num_states=2)


@pytest.mark.parametrize("has_loss_count", [False, True])
@pytest.mark.parametrize("has_summed", [False, True])
def test_parts_cover_the_vector_without_overlap(has_loss_count: bool, has_summed: bool) -> None:
    layout = replace(STEP, has_loss_count=has_loss_count, has_summed=has_summed, num_ranks=3)
    touched = np.zeros(layout.size, int)
    for part in (
        layout.divided_gradients,
        layout.undivided_gradients,
        layout.statistics,
        layout.sums,
        layout.compute_s,
    ):
        touched[part] += 1
    if has_loss_count:  # otherwise the count is the last element of the sums
        touched[layout.count] += 1
    touched[layout.stop] += 1
    assert touched.tolist() == [1] * layout.size


def test_what_the_step_divides_ends_before_loss_metrics_and_count() -> None:
    assert (STEP.gradients, STEP.statistics) == (slice(0, 7), slice(7, 11))
    assert (STEP.sums, STEP.count, STEP.step_size) == (slice(11, 15), 14, 15)


def test_without_ranks_the_layout_is_that_of_the_step() -> None:
    assert STEP.size == STEP.step_size
    assert replace(STEP, num_ranks=2).size == STEP.step_size + 3
