"""Equation 1 of the STANNIS paper: samples_k / batch_size_k steps per epoch, the same for every rank k."""

from collections.abc import Sequence


def public_shares(batch_sizes: Sequence[int], num_private: Sequence[int], num_public: int) -> list[int]:
    """Return the public samples of each rank, such that its samples in total are ∝ its batch size.

    A rank gets no public samples if its private samples alone exceed its share, or if its batch size is 0. At
    least one batch size must be above 0. The returned numbers add up to `num_public`.
    """
    open_ranks = [rank for rank, size in enumerate(batch_sizes) if size]
    while True:
        total = num_public + sum(num_private[k] for k in open_ranks)
        weight = sum(batch_sizes[k] for k in open_ranks)
        full = [k for k in open_ranks if num_private[k] * weight > total * batch_sizes[k]]
        if not full:
            break
        open_ranks = [k for k in open_ranks if k not in full]
    exact = {k: total * batch_sizes[k] / weight - num_private[k] for k in open_ranks}
    shares = [int(max(0.0, exact.get(k, 0.0))) for k in range(len(batch_sizes))]
    by_remainder = sorted(open_ranks, key=lambda k: (shares[k] - exact[k], k))
    for k in by_remainder[: num_public - sum(shares)]:
        shares[k] += 1
    return shares
