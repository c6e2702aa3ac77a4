"""Which sums are timed over a slow link."""

from types import SimpleNamespace

import pytest

from csdctl.worker.tasks import mpi_check
from csdctl.worker.tasks.mpi_check import _time_sums

SIZES = [(2, 1 << 23), (3, 1 << 16), (3, 1 << 20), (2, 1 << 20), (3, 1 << 23), (2, 1 << 16)]


@pytest.mark.parametrize(
    ("mbyte_s", "timed"),
    [
        (1000.0, sorted(SIZES, key=lambda size: size[1])),
        (1.0, [(3, 1 << 16), (2, 1 << 16), (3, 1 << 20), (2, 1 << 20)]),
        (0.1, [(3, 1 << 16), (2, 1 << 16)]),
    ],
)
def test_sums_that_would_take_long_are_left_out(
    monkeypatch: pytest.MonkeyPatch, mbyte_s: float, timed: list[tuple[int, int]]
) -> None:
    asked = []

    def time_sum(world: object, node: str, num_ranks: int, num_bytes: int) -> float:
        asked.append((num_ranks, num_bytes))
        return num_bytes / mbyte_s / 1e6

    monkeypatch.setattr(mpi_check, "_time_sum", time_sum)
    _time_sums(SimpleNamespace(rank=0), "host", SIZES)  # type: ignore[arg-type]
    assert sorted(asked) == sorted(timed)
    assert [size for _, size in asked] == sorted(size for _, size in asked)
