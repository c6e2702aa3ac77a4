"""Equation 1: every sample once, and all ranks finish at the same step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.placement.equation1 import PlacementError, place_shards, steps_per_epoch

BatchSizes = dict[str, int]
NumPrivate = dict[str, int]


def loads_of(private: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[BatchSizes, NumPrivate]]:
    """Batch sizes and private samples of up to 37 ranks."""

    def name(loads: list[tuple[int, int]]) -> tuple[BatchSizes, NumPrivate]:
        sizes = {f"rank{number}": size for number, (size, _) in enumerate(loads)}
        return sizes, {f"rank{number}": count for number, (_, count) in enumerate(loads) if count}

    return st.lists(st.tuples(st.integers(1, 2000), private), min_size=1, max_size=37).map(name)


@given(loads_of(st.integers(0, 5000)), st.integers(1, 2_000_000), st.booleans())
def test_every_public_sample_is_on_one_rank_and_private_ones_stay(
    loads: tuple[BatchSizes, NumPrivate], num_public: int, is_repeating: bool
) -> None:
    sizes, private = loads
    placed = place_shards(sizes, private, num_public, is_repeating=is_repeating)
    assert {shard.name: shard.batch_size for shard in placed} == sizes
    distinct = {shard.name: shard.num_private - shard.num_repeated for shard in placed if shard.num_private}
    assert distinct == private
    assert all(shard.num_repeated >= 0 if is_repeating else not shard.num_repeated for shard in placed)
    edges = [0, *(shard.public_stop for shard in placed)]
    assert [shard.public_start for shard in placed] == edges[:-1]
    assert edges == sorted(edges)
    assert edges[-1] == num_public


@given(loads_of(st.just(0)), st.integers(1, 2_000_000))
def test_public_shards_follow_batch_sizes_to_one_sample(
    loads: tuple[BatchSizes, NumPrivate], num_public: int
) -> None:
    placed = place_shards(*loads, num_public)
    global_batch = sum(loads[0].values())
    for shard in placed:
        assert abs(shard.num_samples - num_public * shard.batch_size / global_batch) < 1
    steps = [shard.num_steps for shard in placed]
    assert max(steps) - min(steps) <= 1


@given(loads_of(st.integers(0, 3000)), st.integers(0, 100_000))
def test_ranks_with_public_samples_finish_within_a_step_and_could_not_sooner(
    loads: tuple[BatchSizes, NumPrivate], num_public: int
) -> None:
    sizes, private = loads
    total = num_public + sum(private.values())
    if not total:
        return
    placed = place_shards(sizes, private, num_public)
    filled = [shard for shard in placed if shard.num_public]
    # Ranks with public samples differ by at most the rounding of one sample each.
    least = max(((shard.num_samples - 1) / shard.batch_size for shard in filled), default=0.0)
    assert all((shard.num_samples + 1) / shard.batch_size >= least for shard in filled)
    if filled:
        assert max(shard.num_steps for shard in filled) - min(shard.num_steps for shard in filled) <= 1
    fewest = -(-total // sum(sizes.values()))
    private_only = max((-(-count // sizes[name]) for name, count in private.items()), default=0)
    assert steps_per_epoch(placed) <= max(fewest + 1, private_only)


def test_host_that_sits_out_reads_nothing_and_the_others_everything() -> None:
    host, *nodes = place_shards({"host": 0, "csd0": 4, "csd1": 8}, {"csd0": 10}, 110)
    assert (host.num_samples, host.num_steps) == (0, 0)
    assert [shard.num_samples for shard in nodes] == [40, 80]
    assert steps_per_epoch([host, *nodes]) == 10


@pytest.mark.parametrize(
    ("sizes", "private", "num_public", "message"),
    [
        ({"host": 4, "csd0": 0}, {"csd0": 7}, 10, "csd0: batch size must be at least 1"),
        ({"host": 0}, {}, 10, "no rank"),
        ({"csd0": 4, "csd1": 4}, {}, 0, "no samples to train on"),
        ({}, {}, 10, "no rank"),
    ],
)
def test_impossible_placement_is_refused(
    sizes: BatchSizes, private: NumPrivate, num_public: int, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        place_shards(sizes, private, num_public)


def test_repeating_node_reads_its_samples_until_it_has_enough() -> None:
    sizes, private = {"host": 100, "csd0": 10, "csd1": 10}, {"csd0": 500, "csd1": 200}
    host, csd0, csd1 = place_shards(sizes, private, 6000, is_repeating=True)
    assert (csd0.num_private, csd0.num_repeated) == (500, 0)
    assert (csd1.num_private, csd1.num_repeated) == (500, 300)
    assert {host.num_steps, csd0.num_steps, csd1.num_steps} == {59}
    assert (host.weight, csd0.weight) == (1.0, 1.0)
    assert csd1.weight * csd1.num_samples == pytest.approx(200 + csd1.num_public)
