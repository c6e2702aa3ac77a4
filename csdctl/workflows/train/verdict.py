"""What a verification has shown: pure, from the numbers that rank 0 measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from csdctl.worker.protocol.events import Verified

NEAR = 8.0
"""Up to how many spreads two results are called as near as one process is to itself: a spread is the largest
of a few random draws."""


@dataclass(frozen=True)
class Verdict:
    """The outcome in words, and what to do when it is not that all are equal."""

    is_equal: bool
    text: str
    remedy: str = ""


def judge(verified: Verified, nodes: Sequence[str]) -> Verdict:
    """Return what the numbers of rank 0 show; `nodes`: the machine of every rank."""
    found = verified.of_ranks
    numbers = [number for rank in found for number in (rank.difference, rank.spread, rank.one_sample)]
    if not all(map(math.isfinite, [verified.sum_difference, *numbers])):
        return _judge_not_finite(verified, nodes)
    if verified.sum_difference > verified.sum_rounding:
        return Verdict(
            False,
            f"the sum that all ranks got is not the sum of what they computed: an element is off by "
            f"{verified.sum_difference:.1e} of its terms, and rounding explains {verified.sum_rounding:.1e}",
            f"the {verified.collective} collective is at fault: please report it, with `csdctl discover`",
        )
    if wrong := [at for at, rank in enumerate(found) if rank.is_sharp and rank.difference > rank.tolerance]:
        return _judge_wrong(verified, nodes, wrong)
    if hidden := [at for at, rank in enumerate(found) if not rank.is_sharp]:
        return _judge_hidden(verified, nodes, hidden)
    one_batch = verified.one_batch
    if one_batch and not one_batch.difference <= one_batch.tolerance:
        return Verdict(
            False,
            f"one batch of all samples has another gradient than the ranks' batches together: they differ "
            f"by {one_batch.difference:.1e}, rounding explains {one_batch.spread:.1e}",
            "a layer or the loss compares the samples of a batch with each other: the gradient depends on "
            "how samples are divided among the ranks",
        )
    apart = max([*found, *filter(None, [one_batch])], key=lambda one: one.difference / one.spread)
    spreads = apart.difference / apart.spread
    if spreads <= NEAR:
        return Verdict(True, f"equal: as near as one process is to itself in {verified.compared_in}")
    return Verdict(
        True,
        f"equal but for rounding: {spreads:.0f} times as far apart as one process is from itself in "
        f"{verified.compared_in}; one sample makes {apart.one_sample / apart.difference:.0f} times as much",
    )


def _judge_wrong(verified: Verified, nodes: Sequence[str], wrong: Sequence[int]) -> Verdict:
    worst = max((verified.of_ranks[at] for at in wrong), key=lambda rank: rank.difference)
    return Verdict(
        False,
        f"{_names(nodes, wrong)}: the gradient differs by {worst.difference:.1e} from the one that the host "
        f"computes of the same samples; rounding explains {worst.spread:.1e}, one sample makes "
        f"{worst.one_sample:.1e}",
        "compare TensorFlow versions and processors with `csdctl discover`; "
        "try another number of threads in the plan",
    )


def _judge_not_finite(verified: Verified, nodes: Sequence[str]) -> Verdict:
    wrong = [at for at, rank in enumerate(verified.of_ranks) if not math.isfinite(rank.difference)]
    where = f"on {_names(nodes, wrong)} " if wrong else ""
    return Verdict(
        False,
        f"nothing can be compared: the gradient of random samples {where}is 0 or not finite "
        f"in {verified.dtype}",
        "use mixed_bfloat16 in place of mixed_float16"
        if verified.dtype == "float16"
        else "look at the initial weights, and at data.input_range",
    )


def _judge_hidden(verified: Verified, nodes: Sequence[str], hidden: Sequence[int]) -> Verdict:
    worst = min((verified.of_ranks[at] for at in hidden), key=lambda rank: rank.one_sample)
    if worst.one_sample == 0:
        return Verdict(
            False,
            f"nothing can be compared on {_names(nodes, hidden)}: another sample has the same gradient",
            "look at the initial weights: what reaches the loss does not depend on the samples",
        )
    return Verdict(
        False,
        f"nothing can be said about {_names(nodes, hidden)}: rounding in {verified.compared_in} moves the "
        f"gradient by {worst.spread:.1e}, one sample by no more than {worst.one_sample:.1e}",
        "look at the initial weights: with these, the gradient of random samples is lost in rounding",
    )


def _names(nodes: Sequence[str], positions: Sequence[int], at_most: int = 5) -> str:
    more = f" and {len(positions) - at_most} more" if len(positions) > at_most else ""
    return ", ".join(nodes[at] for at in positions[:at_most]) + more
