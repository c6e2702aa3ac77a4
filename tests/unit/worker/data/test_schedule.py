"""Every public sample exactly once an epoch, no private one elsewhere, whatever changes in the middle."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from csdctl.worker.data.schedule import (
    OwnSamples,
    Segment,
    Share,
    Span,
    begin_epoch,
    change_segment,
    cut_spans,
)
from csdctl.worker.protocol.json_codec import from_json, to_json

OWN = st.lists(st.builds(OwnSamples, st.integers(0, 60), st.integers(0, 200)), min_size=1, max_size=6)
SIZES = st.integers(1, 40)


def read(leg: Segment, step: int, seen: Counter[tuple[str, int, int]]) -> None:
    """Count what every rank takes in one step: kind, owner and place."""
    for share in leg.batch(step):
        assert share.num_samples <= share.batch_size
        seen.update(
            ("private", share.rank, place) for place in range(share.private_start, share.private_stop)
        )
        seen.update(("public", share.rank, place) for place in range(share.public_start, share.public_stop))
        for piece in share.borrowed:
            seen.update(("public", piece.rank, place) for place in range(piece.start, piece.stop))


@given(OWN, st.data())
def test_every_sample_is_read_once_however_often_batch_sizes_change(
    own: list[OwnSamples], data: st.DataObject
) -> None:
    sizes = {rank: data.draw(SIZES) for rank in range(len(own))}
    leg, step = begin_epoch(own, sizes), 0
    seen: Counter[tuple[str, int, int]] = Counter()
    while step < leg.stop_step:
        read(leg, step, seen)
        step += 1
        if data.draw(st.integers(0, 4)) == 0:
            sizes = {rank: data.draw(SIZES) for rank in range(len(own))}
            leg = change_segment(leg, step, sizes)
    wanted = {("private", rank, place) for rank, one in enumerate(own) for place in range(one.num_private)}
    wanted |= {("public", rank, place) for rank, one in enumerate(own) for place in range(one.num_public)}
    assert set(seen) == wanted
    assert all(count == 1 for count in seen.values())


@given(OWN, st.data())
def test_who_leaves_takes_its_private_samples_away_and_leaves_the_public_ones(
    own: list[OwnSamples], data: st.DataObject
) -> None:
    sizes = {rank: data.draw(SIZES) for rank in range(len(own))}
    leg = begin_epoch(own, sizes)
    num_before = data.draw(st.integers(0, leg.stop_step))
    seen: Counter[tuple[str, int, int]] = Counter()
    for step in range(num_before):
        read(leg, step, seen)
    leaving = data.draw(st.sets(st.integers(1, max(1, len(own) - 1)), max_size=len(own) - 1))
    leg = change_segment(leg, num_before, {rank: size for rank, size in sizes.items() if rank not in leaving})
    for step in range(num_before, leg.stop_step):
        read(leg, step, seen)
    assert all(count == 1 for count in seen.values())
    public = {key for key in seen if key[0] == "public"}
    assert len(public) == sum(one.num_public for one in own)
    for rank, one in enumerate(own):
        if rank not in leaving:
            assert sum(key[:2] == ("private", rank) for key in seen) == one.num_private


@given(OWN, st.data())
def test_who_is_away_at_the_beginning_lends_all_its_public_samples(
    own: list[OwnSamples], data: st.DataObject
) -> None:
    present = {0, *data.draw(st.sets(st.integers(0, len(own) - 1)))}
    leg = begin_epoch(own, {rank: data.draw(SIZES) for rank in present})
    seen: Counter[tuple[str, int, int]] = Counter()
    for step in range(leg.stop_step):
        read(leg, step, seen)
    assert sum(key[0] == "public" for key in seen) == sum(one.num_public for one in own)
    assert all(count == 1 for count in seen.values())


@given(st.lists(st.integers(20, 400), min_size=2, max_size=6), st.data())
def test_ranks_end_together_when_only_public_samples_are_there(
    counts: list[int], data: st.DataObject
) -> None:
    own = [OwnSamples(0, count) for count in counts]
    leg = begin_epoch(own, {rank: data.draw(SIZES) for rank in range(len(own))})
    steps = [share.num_samples / share.batch_size for share in leg.shares]
    assert max(steps) - min(steps) <= max(1 / share.batch_size for share in leg.shares) * len(own)


def test_batches_hold_private_public_and_borrowed_samples_in_equal_parts() -> None:
    share = Share(1, 10, 0, 30, 0, 60, (Span(2, 0, 10),))
    for number in range(10):
        batch = share.batch(number)
        assert (batch.num_private, batch.num_public, batch.num_borrowed) == (3, 6, 1)


def test_slow_rank_lends_its_end_and_keeps_its_beginning() -> None:
    leg = begin_epoch([OwnSamples(0, 100), OwnSamples(0, 100)], {0: 10, 1: 10})
    changed = change_segment(leg, 2, {0: 15, 1: 5})
    fast, slow = changed.shares
    assert (slow.public_start, slow.public_stop) == (20, 60)
    assert fast.borrowed == (Span(1, 60, 100),)
    assert changed.stop_step == 10


def test_leg_that_does_not_change_is_the_same() -> None:
    leg = begin_epoch([OwnSamples(5, 95), OwnSamples(20, 80)], {0: 10, 1: 10})
    again = change_segment(leg, 3, {0: 10, 1: 10})
    for step in range(3, leg.stop_step):
        assert sum(share.num_samples for share in again.batch(step)) <= 20
    assert again.stop_step == leg.stop_step


def test_leg_travels_as_json() -> None:
    leg = change_segment(
        begin_epoch([OwnSamples(5, 95), OwnSamples(0, 80)], {0: 10, 1: 10}), 2, {0: 18, 1: 2}
    )
    assert from_json(Segment, to_json(leg)) == leg


def test_pieces_are_cut_across_their_borders() -> None:
    pieces = [Span(1, 10, 20), Span(2, 0, 5), Span(3, 7, 9)]
    assert cut_spans(pieces, 8, 16) == (Span(1, 18, 20), Span(2, 0, 5), Span(3, 7, 8))
    assert cut_spans(pieces, 3, 3) == ()


def test_rank_that_sits_out_goes_on_to_when_batch_sizes_change() -> None:
    leg = begin_epoch([OwnSamples(0, 0), OwnSamples(10, 30), OwnSamples(0, 80)], {0: 0, 1: 4, 2: 8})
    assert leg.stop_step == 10
    changed = change_segment(leg, 5, {0: 0, 1: 2, 2: 10})
    assert [share.num_samples for share in changed.shares] == [0, 10, 50]
