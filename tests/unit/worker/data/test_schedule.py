"""Ranks read every public sample once an epoch and only their own private ones, whatever changes midway."""

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from csdctl.worker.data.schedule import OwnSamples, Segment, Share, Span, begin_epoch, change_segment

OWN = st.lists(st.builds(OwnSamples, st.integers(0, 60), st.integers(0, 200)), min_size=1, max_size=6)
SIZES = st.integers(1, 40)


Seen = Counter[tuple[str, int, int]]
"""How often each sample was read, by visibility, owner and index."""


def read(segment: Segment, steps: Iterable[int], seen: Seen) -> None:
    """Count the samples that every rank reads in these steps."""
    for step in steps:
        for share in (each.batch(step - segment.start_step) for each in segment.shares):
            assert share.num_samples <= share.batch_size
            spans = [("private", share.rank, share.private_start, share.private_stop)]
            spans.append(("public", share.rank, share.public_start, share.public_stop))
            spans += [("public", span.rank, span.start, span.stop) for span in share.reassigned]
            seen.update((kind, rank, index) for kind, rank, *span in spans for index in range(*span))


def samples_of(own: list[OwnSamples], kind: str) -> Seen:
    counts = [one.num_private if kind == "private" else one.num_public for one in own]
    return Counter((kind, rank, index) for rank, count in enumerate(counts) for index in range(count))


@given(OWN, st.data())
def test_every_sample_is_read_once_however_often_batch_sizes_change(
    own: list[OwnSamples], data: st.DataObject
) -> None:
    sizes = {rank: data.draw(SIZES) for rank in range(len(own))}
    segment, step, seen = begin_epoch(own, sizes), 0, Seen()
    while step < segment.stop_step:
        read(segment, [step], seen)
        step += 1
        if data.draw(st.integers(0, 4)) == 0:
            sizes = {rank: data.draw(SIZES) for rank in range(len(own))}
            segment = change_segment(segment, step, sizes)
    assert seen == samples_of(own, "private") + samples_of(own, "public")


@given(OWN, st.booleans(), st.data())
def test_public_samples_of_a_rank_that_leaves_or_never_comes_are_read_and_its_private_ones_are_not(
    own: list[OwnSamples], is_absent: bool, data: st.DataObject
) -> None:
    sizes, seen = {rank: data.draw(SIZES) for rank in range(len(own))}, Seen()
    leaving = data.draw(st.sets(st.integers(1, max(1, len(own) - 1)), max_size=len(own) - 1))
    left = {rank: size for rank, size in sizes.items() if rank not in leaving}
    segment = begin_epoch(own, left if is_absent else sizes)
    if not is_absent:
        num_before = data.draw(st.integers(0, segment.stop_step))
        read(segment, range(num_before), seen)
        segment = change_segment(segment, num_before, left)
    read(segment, range(segment.start_step, segment.stop_step), seen)
    private = Counter(key for key in seen.elements() if key[0] == "private")
    assert seen - private == samples_of(own, "public")
    of_others = Counter(key for key in samples_of(own, "private").elements() if key[1] in left)
    assert of_others <= private <= samples_of(own, "private")


@given(st.lists(st.integers(20, 400), min_size=2, max_size=6), st.data())
def test_ranks_end_together_when_all_samples_are_public(counts: list[int], data: st.DataObject) -> None:
    own = [OwnSamples(0, count) for count in counts]
    segment = begin_epoch(own, {rank: data.draw(SIZES) for rank in range(len(own))})
    steps = [share.num_samples / share.batch_size for share in segment.shares]
    assert max(steps) - min(steps) <= max(1 / share.batch_size for share in segment.shares) * len(own)


def test_batches_mix_private_public_and_reassigned_samples_in_proportion() -> None:
    share = Share(1, 10, 0, 30, 0, 60, (Span(2, 0, 10),))
    for number in range(10):
        batch = share.batch(number)
        assert (batch.num_private, batch.num_public, batch.num_reassigned) == (3, 6, 1)


def test_end_of_a_slow_ranks_public_samples_is_reassigned() -> None:
    segment = begin_epoch([OwnSamples(0, 100), OwnSamples(0, 100)], {0: 10, 1: 10})
    changed = change_segment(segment, 2, {0: 15, 1: 5})
    fast, slow = changed.shares
    assert (slow.public_start, slow.public_stop) == (20, 60)
    assert fast.reassigned == (Span(1, 60, 100),)
    assert changed.stop_step == 10


def test_rank_with_batch_size_0_stays_without_samples_when_batch_sizes_change() -> None:
    segment = begin_epoch([OwnSamples(0, 0), OwnSamples(10, 30), OwnSamples(0, 80)], {0: 0, 1: 4, 2: 8})
    assert segment.stop_step == 10
    changed = change_segment(segment, 5, {0: 0, 1: 2, 2: 10})
    assert [share.num_samples for share in changed.shares] == [0, 10, 50]


def test_rank_that_comes_back_in_an_epoch_reads_its_private_samples_and_public_ones_that_are_left() -> None:
    own = [OwnSamples(0, 40), OwnSamples(20, 40), OwnSamples(20, 40)]
    without = change_segment(begin_epoch(own, {0: 10, 1: 10, 2: 10}), 2, {0: 10, 2: 10})
    again = change_segment(without, 3, {0: 10, 1: 10, 2: 10})
    assert [share.rank for share in again.shares] == [0, 1, 2]
    assert again.shares[1].num_private == 20 - 7, "those that it had not read before"
    assert again.shares[1].num_public == 0
    seen = Seen()
    read(without, [2], seen)
    read(again, range(3, again.stop_step), seen)
    left = sum(share.num_samples - share.num_private for share in without.shares)
    assert sum(key[0] == "public" for key in seen.elements()) == left
    assert set(seen.values()) == {1}


def test_rank_that_comes_back_when_all_else_is_read_prolongs_the_epoch_by_its_private_samples() -> None:
    own = [OwnSamples(0, 40), OwnSamples(20, 40), OwnSamples(20, 40)]
    without = change_segment(begin_epoch(own, {0: 10, 1: 10, 2: 10}), 2, {0: 10, 2: 10})
    at_end = change_segment(without, without.stop_step, {0: 10, 1: 10, 2: 10})
    assert [share.num_samples for share in at_end.shares] == [0, 13, 0]
    assert at_end.stop_step == without.stop_step + 2
