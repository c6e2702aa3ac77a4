"""Chunks: their order, and that each element is sent once."""

import numpy as np
import pytest

from csdctl.worker.protocol.chunks import CHUNK_SIZE, count_early, divide, divide_early


@pytest.mark.parametrize("is_halved", [False, True])
@pytest.mark.parametrize("num_gradients", [1, 7, CHUNK_SIZE - 1, CHUNK_SIZE, 5 * CHUNK_SIZE + 3])
def test_every_element_is_sent_once_gradients_first_and_from_their_end(
    num_gradients: int, *, is_halved: bool
) -> None:
    size = num_gradients + 40
    num_early = count_early(num_gradients, is_halved=is_halved)
    chunks = divide(size, num_early, is_halved=is_halved)
    early = divide_early(num_early, is_halved=is_halved)
    assert chunks[: len(early)] == early
    assert [chunk.elements.start for chunk in early] == sorted(
        (chunk.elements.start for chunk in early), reverse=True
    )
    in_elements, on_wire = np.zeros(size, int), np.zeros(size, int)
    for chunk in chunks:
        in_elements[chunk.elements] += 1
        on_wire[chunk.wire] += 1
        assert chunk.wire.stop - chunk.wire.start <= CHUNK_SIZE
    assert (in_elements == 1).all()
    assert on_wire.max() == 1
    assert on_wire.sum() == size - is_halved * num_early // 2
    assert all(chunk.elements.stop <= num_gradients for chunk in early)


def test_gradients_of_a_single_message_are_not_sent_apart() -> None:
    assert count_early(CHUNK_SIZE - 1, is_halved=False) == 0
    assert len(divide(CHUNK_SIZE)) == 1
