"""Gradients as bfloat16 on the wire: the rounding, and sums of real ranks and links."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from csdctl.worker.group.bf16 import from_bf16, pack, to_bf16, unpack
from csdctl.worker.group.chunks import divide
from tests.linked_ranks import NUM_ELEMENTS, SIZE, Group

NUM_HALVED = NUM_ELEMENTS // 2 * 2 - 10


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


@pytest.fixture
def group() -> Iterator[Group]:
    started = Group(f"test-{os.getpid()}-{time.monotonic_ns()}")
    yield started
    started.end()


def test_sum_has_the_same_bits_on_all_ranks_and_half_the_bytes(group: Group) -> None:
    group.all(f"choose star {NUM_ELEMENTS}/{NUM_HALVED}")
    before = {tuple(row[:3]): row[3] for row in group.all("traffic")[0]}
    for _ in range(3):
        answers = group.all("sum")
        assert answers == [answers[0]] * SIZE
        assert answers[0][0] == SIZE * (SIZE + 1) / 2
        # The last elements are not rounded: n, the seconds, and the norm.
        assert answers[0][1] == SIZE * (SIZE + 1) / 2 * (NUM_ELEMENTS - 1)
    after = {tuple(row[:3]): row[3] for row in group.all("traffic")[0]}
    sent_bytes = 3 * (4 * NUM_ELEMENTS - 2 * NUM_HALVED)
    for pair in ((0, 1), (1, 0)):
        assert sent_bytes <= after["sums", *pair] - before["sums", *pair] <= 1.02 * sent_bytes


def test_ends_of_vectors_are_checked_behind_bfloat16(group: Group) -> None:
    """A rank of other samples than rank 0 expects is found, and so is a gradient that is not finite."""
    group.all(f"choose star {NUM_ELEMENTS}/{NUM_HALVED}")
    answers = group.all("checked 1.5")
    assert answers == [["4.5", 24.0, 0.0, 0.5, 0.5, 0.5]] * SIZE
    group.send(0, "checked 1.5")
    group.send(1, "checked nan")
    group.send(2, "checked 1.5")
    assert [group.answer(rank)[0] for rank in range(SIZE)] == ["nan"] * SIZE
    assert group.all("not-finite")[0] == [1]
    group.send(0, "checked 1.5")
    group.send(1, "checked 1.5")
    group.send(2, "checked 1.5 9")
    assert group.answer(0)["culprit"] == 2


def test_rank_that_sends_another_form_is_refused(group: Group) -> None:
    group.send(0, f"choose star {NUM_ELEMENTS}/{NUM_HALVED}")
    group.send(1, f"choose star {NUM_ELEMENTS}/{NUM_HALVED}")
    group.send(2, f"choose star {NUM_ELEMENTS}")
    found = group.answer(0)
    assert found["culprit"] == 2
    assert f"sums {NUM_ELEMENTS} elements in a step" in found["message"]
    assert f"expected {NUM_ELEMENTS} ({NUM_HALVED} as bfloat16)" in found["message"]
