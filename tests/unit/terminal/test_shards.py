"""The shards of a run as text."""

from csdctl.terminal.train import format_shards
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime


def rank(number: int, node: str, batch_size: int, private: int, public: int, **more: float) -> RankSpec:
    return RankSpec(number, node, batch_size, Runtime(1), None, None, private, public, **more)  # type: ignore[arg-type]


def run(*ranks: RankSpec) -> RunSpec:
    return RunSpec("run", "", "", Recipe(), ranks, None, None, "")


def test_every_rank_is_listed_with_its_private_and_public_samples() -> None:
    assert format_shards(run(rank(0, "host", 100, 0, 5000), rank(1, "csd0", 10, 400, 100))) == [
        "shards: host 5,000 public; csd0 400 private, 100 public"
    ]


def test_repeated_samples_and_their_weight_are_named() -> None:
    lines = format_shards(
        run(rank(0, "host", 100, 0, 5000), rank(1, "csd0", 10, 500, 0, num_repeated=150, weight=0.7))
    )
    assert lines[1] == "csd0: 350 private samples are read 1.43 times an epoch, each with weight 0.70"


def test_node_that_makes_the_epoch_longer_is_named() -> None:
    lines = format_shards(run(rank(0, "host", 100, 0, 1100), rank(1, "csd0", 10, 500, 0)))
    assert "private samples of csd0 take up to 50 steps, other ranks have samples for 11" in lines[-1]


def test_large_fleet_is_summarized() -> None:
    ranks = [rank(number, f"csd{number}", 10, 10 * number, 100) for number in range(1, 12)]
    assert format_shards(run(*ranks))[0] == "shards: 110 to 210 samples a rank"
