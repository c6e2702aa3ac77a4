"""Equation 1: every sample once, and all ranks finish at the same step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.placement.equation1 import PlacementError, RankLoad, place_shards, steps_per_epoch

batch_sizes = st.integers(1, 2000)


def loads_of(private: st.SearchStrategy[int]) -> st.SearchStrategy[list[RankLoad]]:
    loads = st.builds(RankLoad, st.just("rank"), batch_sizes, private)
    return st.lists(loads, min_size=1, max_size=37)


@given(loads_of(st.integers(0, 5000)), st.integers(1, 2_000_000))
def test_every_public_sample_is_on_one_rank_and_private_ones_stay(
    ranks: list[RankLoad], num_public: int
) -> None:
    placed = place_shards(ranks, num_public)
    assert [shard.num_private for shard in placed] == [rank.num_private for rank in ranks]
    assert [shard.batch_size for shard in placed] == [rank.batch_size for rank in ranks]
    edges = [0, *(shard.public_stop for shard in placed)]
    assert [shard.public_start for shard in placed] == edges[:-1]
    assert edges == sorted(edges)
    assert edges[-1] == num_public
    assert sum(shard.num_samples for shard in placed) == num_public + sum(rank.num_private for rank in ranks)


@given(loads_of(st.just(0)), st.integers(1, 2_000_000))
def test_public_shards_follow_batch_sizes_to_one_sample(ranks: list[RankLoad], num_public: int) -> None:
    placed = place_shards(ranks, num_public)
    global_batch = sum(rank.batch_size for rank in ranks)
    for shard in placed:
        assert abs(shard.num_samples - num_public * shard.batch_size / global_batch) < 1
    steps = [shard.num_steps for shard in placed]
    assert max(steps) - min(steps) <= 1


@given(loads_of(st.integers(0, 3000)), st.integers(0, 100_000))
def test_ranks_with_public_samples_finish_within_a_step_and_could_not_sooner(
    ranks: list[RankLoad], num_public: int
) -> None:
    if num_public + sum(rank.num_private for rank in ranks) == 0:
        return
    placed = place_shards(ranks, num_public)
    filled = [shard for shard in placed if shard.num_public]
    per_batch = [shard.num_samples / shard.batch_size for shard in filled]
    for shard, ratio in zip(filled, per_batch, strict=True):
        # ranks with public samples differ by at most the rounding of one sample each
        assert ratio - 1 / shard.batch_size <= min(
            other_ratio + 1 / other.batch_size for other_ratio, other in zip(per_batch, filled, strict=True)
        )
    if filled:
        assert max(shard.num_steps for shard in filled) - min(shard.num_steps for shard in filled) <= 1
    total = num_public + sum(rank.num_private for rank in ranks)
    fewest = -(-total // sum(rank.batch_size for rank in ranks))
    private_only = max(-(-rank.num_private // rank.batch_size) for rank in ranks)
    assert steps_per_epoch(placed) <= max(fewest + 1, private_only)


def test_host_that_sits_out_reads_nothing_and_the_others_everything() -> None:
    host, *nodes = place_shards([RankLoad("host", 0), RankLoad("csd0", 4, 10), RankLoad("csd1", 8)], 110)
    assert (host.num_samples, host.num_steps) == (0, 0)
    assert [shard.num_samples for shard in nodes] == [40, 80]
    assert steps_per_epoch([host, *nodes]) == 10


@pytest.mark.parametrize(
    ("ranks", "num_public", "message"),
    [
        ([RankLoad("host", 4), RankLoad("csd0", 0, 7)], 10, "csd0: batch size must be at least 1"),
        ([RankLoad("host", 0)], 10, "no rank"),
        ([RankLoad("csd0", 4), RankLoad("csd1", 4)], 0, "no samples to train on"),
        ([], 10, "no rank"),
    ],
)
def test_impossible_placement_is_refused(ranks: list[RankLoad], num_public: int, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        place_shards(ranks, num_public)


@given(loads_of(st.integers(0, 5000)), st.integers(1, 2_000_000))
def test_repeating_reads_every_private_sample_at_least_once(ranks: list[RankLoad], num_public: int) -> None:
    placed = place_shards(ranks, num_public, is_repeating=True)
    edges = [0, *(shard.public_stop for shard in placed)]
    assert [shard.public_start for shard in placed] == edges[:-1]
    assert edges[-1] == num_public
    for rank, shard in zip(ranks, placed, strict=True):
        assert shard.num_private - shard.num_repeated == rank.num_private
        assert shard.num_repeated >= 0
        assert (shard.num_private == 0) == (rank.num_private == 0)


def test_repeating_node_reads_its_samples_until_it_has_enough() -> None:
    ranks = [
        RankLoad("host", 100),
        RankLoad("csd0", 10, num_private=500),
        RankLoad("csd1", 10, num_private=200),
    ]
    host, csd0, csd1 = place_shards(ranks, 6000, is_repeating=True)
    assert (csd0.num_private, csd0.num_repeated) == (500, 0)
    assert (csd1.num_private, csd1.num_repeated) == (500, 300)
    assert {host.num_steps, csd0.num_steps, csd1.num_steps} == {59}
    assert (host.weight, csd0.weight) == (1.0, 1.0)
    assert csd1.weight * csd1.num_samples == pytest.approx(200 + csd1.num_public)
