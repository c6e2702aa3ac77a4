"""Chunks: each element is sent once, within the limit of a message."""

import numpy as np
import pytest

from csdctl.worker.group.chunks import CHUNK_SIZE, divide


@pytest.mark.parametrize("num_halved", [0, 2, CHUNK_SIZE, 5 * CHUNK_SIZE + 4])
@pytest.mark.parametrize("num_whole", [1, CHUNK_SIZE, CHUNK_SIZE + 1])
def test_every_element_is_sent_once(num_halved: int, num_whole: int) -> None:
    size = num_halved + num_whole
    in_elements, on_wire = np.zeros(size, int), np.zeros(size, int)
    for chunk in divide(size, num_halved):
        in_elements[chunk.elements] += 1
        on_wire[chunk.wire] += 1
        assert chunk.wire.stop - chunk.wire.start <= CHUNK_SIZE
    assert (in_elements == 1).all()
    assert on_wire.max() == 1
    assert on_wire.sum() == size - num_halved // 2
