"""Gradients as bfloat16 on the wire: the rounding. test_link.py has sums of real ranks and links."""

import numpy as np
import pytest

from csdctl.worker.group.bf16 import from_bf16, pack, to_bf16, unpack
from csdctl.worker.group.chunks import divide


def rounded(values: list[float]) -> list[float]:
    halves = np.empty(len(values), np.uint16)
    to_bf16(np.array(values, np.float32), halves)
    return from_bf16(halves).tolist()


def test_values_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    step = 2.0**-7
    assert rounded([1.0, 1 + 0.4 * step, 1 + 0.6 * step]) == [1.0, 1.0, 1 + step]
    assert rounded([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2]) == [1.0, 1 + 2 * step, -1.0]
    assert rounded([0.0, 3e38, 1e-38]) == pytest.approx([0.0, 3e38, 1e-38], rel=2**-8)
    assert rounded([float("inf"), float("-inf"), 3.4e38]) == [float("inf"), float("-inf"), float("inf")]


def test_what_is_not_a_number_stays_so() -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    assert np.isnan(rounded(bits.view(np.float32).tolist())).all()


def test_vector_has_its_elements_again_behind_the_wire() -> None:
    chunks = divide(11, 8)
    vector = np.array([*range(8), 1.1, 2.2, 3.3], np.float32)
    sent, received = vector.copy(), np.full(11, np.nan, np.float32)
    pack(sent, chunks)
    for chunk in chunks:
        received[chunk.wire] = sent[chunk.wire]
    assert np.isnan(received).sum() == 4  # half the bytes of eight elements
    assert unpack(received, chunks, np.full(11, 9.0, np.float32)).tolist() == vector.tolist()
