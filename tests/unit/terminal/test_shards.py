"""The shards of a run as text."""

import pytest

from csdctl.terminal.train import format_shards
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime


def rank(number: int, node: str, batch_size: int, private: int, public: int, **more: float) -> RankSpec:
    return RankSpec(number, node, batch_size, Runtime(1), None, None, private, public, **more)  # type: ignore[arg-type]


def run(*ranks: RankSpec) -> RunSpec:
    return RunSpec("run", "", "", Recipe(), ranks, None, None, "")


HOST = rank(0, "host", 100, 0, 5000)


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([HOST, rank(1, "csd0", 10, 400, 100)], "shards: host 5,000 public; csd0 400 private, 100 public"),
        (
            [HOST, rank(1, "csd0", 10, 500, 0, num_repeated=150, weight=0.7)],
            "csd0: 350 private samples are read 1.43 times an epoch, each with weight 0.70",
        ),
        (
            [rank(0, "host", 100, 0, 1100), rank(1, "csd0", 10, 500, 0)],
            "private samples of csd0 take up to 50 steps, other ranks have samples for 11: "
            "more public data, or larger batches there, would help",
        ),
        (
            [rank(number, f"csd{number}", 10, 10 * number, 100) for number in range(1, 12)],
            "shards: 110 to 210 samples per rank",
        ),
    ],
)
def test_shards_and_what_is_unusual_about_them_are_lines(ranks: list[RankSpec], line: str) -> None:
    assert line in format_shards(run(*ranks))
