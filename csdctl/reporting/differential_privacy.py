"""What noise on private samples promises: ε at δ, for the worst sample of each node, by what was released.

A sample is in one noisy sum of its node each time it is read. Every sum is a Gaussian mechanism, and k of
them on one sample are one with 1/√k of the noise (Dong, Roth, Su, 2022), also when each depends on the
results of those before. ε comes from the accountant dp-accounting, by the exact formula of Balle and Wang
(2018).

Neighbouring data sets differ in one sample that was replaced by any other, so that the sum moves by up to
twice the clipping norm. Which samples a step reads follows from the seed, which others know: nothing is
gained by sampling.
"""

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from csdctl.errors import InputError
from csdctl.worker.protocol.events import (
    STOPPED,
    EpochEnd,
    Event,
    Finished,
    Joined,
    LinkLost,
    Paused,
    Progress,
)
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import RunSpec

SENSITIVITY = 2.0
"""How far one replaced sample moves a sum, in clipping norms."""
INSTALL = "pip install 'csdctl[privacy]'"
EPOCH_ENTERED = (Progress, LinkLost)
"""Said by rank 0 after an epoch's end, these mean that the next epoch has begun."""


@dataclass(frozen=True)
class NodePrivacy:
    """Of one node's private samples."""

    node: str
    num_private: int
    """Different samples."""
    num_releases: int
    """Noisy sums that a sample was in, at most."""
    epsilon: float | None
    """None when the accountant is not installed."""


@dataclass(frozen=True)
class Privacy:
    """Of one run; `nodes` are those with private samples."""

    l2_norm_clip: float
    noise_multiplier: float
    delta: float
    nodes: tuple[NodePrivacy, ...]


def check_accountant() -> None:
    """Raise InputError when dp-accounting is not installed."""
    if not _has_accountant():
        raise InputError(
            "data.private.noise needs the accountant dp-accounting, which is not installed", remedy=INSTALL
        )


def _has_accountant() -> bool:
    return importlib.util.find_spec("dp_accounting") is not None


def compute_epsilon(noise: Noise, num_releases: int) -> float:
    """ε at `noise.delta` for a sample that was in `num_releases` noisy sums."""
    if not num_releases:
        return 0.0
    from dp_accounting import get_epsilon_gaussian  # heavy, and optional

    deviation = noise.noise_multiplier / SENSITIVITY / math.sqrt(num_releases)
    return float(get_epsilon_gaussian(deviation, noise.delta))


def plan_privacy(spec: RunSpec, events: Iterable[Event]) -> Privacy | None:
    """What the run will have come to at its end, with its `events` so far; None without noise."""
    if spec.noise is None:
        return None
    kept = list(events)
    done = max((event.epoch for event in kept if isinstance(event, EpochEnd)), default=0)
    passes = [count + spec.recipe.epochs - done for count in count_passes(kept, len(spec.ranks))]
    samples = [(one.node, one.num_private, one.num_repeated) for one in spec.ranks]
    return _privacy(spec.noise, samples, passes)


def measure_privacy(manifest: Mapping[str, Any], events: Iterable[Event]) -> Privacy | None:
    """What a run has come to so far; `manifest` is its manifest.json. None without noise."""
    if not manifest.get("noise"):
        return None
    placed = manifest["placed"]
    samples = [(one["name"], one["num_private"], one["num_repeated"]) for one in placed]
    return _privacy(Noise(**manifest["noise"]), samples, count_passes(events, len(placed)))


def count_passes(events: Iterable[Event], num_ranks: int) -> list[int]:
    """How often each rank began to read its samples, at most; by rank.

    By what rank 0 said, whose words reach csdctl without a network: all members of its group are in the same
    epoch. An epoch that a new group went on with counts again, for it may have read the samples of one step,
    or of all since a checkpoint, a second time. Where the words break off, what may have followed counts, and
    so does a group that another rank told of and rank 0, lost before it could, did not.
    """
    passes, unheard_groups = [0] * num_ranks, [0] * num_ranks
    members: set[int] = set()
    entered, is_between, is_open = (
        0,
        False,
        False,
    )  # is_between: ended an epoch, and may have entered the next

    def enter() -> None:
        for rank in members:
            passes[rank] += 1

    for event in events:
        if event.rank != 0:
            unheard_groups[event.rank] += isinstance(event, Joined)
            continue
        if isinstance(event, Joined):
            unheard = event.epoch - entered if is_open and members else 0
            for _ in range(max(unheard, 1 if is_between else 0)):
                enter()  # csdctl was ended while the ranks went on
            members = {int(rank) for rank in event.batch_sizes}
            for rank in members:
                unheard_groups[rank] -= 1
            entered, is_between, is_open = event.epoch, False, True
            enter()
        elif isinstance(event, EpochEnd):
            if is_between:
                enter()
            entered, is_between = event.epoch, True
        elif isinstance(event, EPOCH_ENTERED) or (isinstance(event, Finished) and event.reason == STOPPED):
            if is_between:
                enter()
                entered += 1
            is_between = False
            is_open = isinstance(event, Progress)
        elif isinstance(event, Paused | Finished):
            is_between = is_open = False
    if is_between:
        enter()
    return [count + max(0, more) for count, more in zip(passes, unheard_groups, strict=True)]


def _privacy(noise: Noise, samples: Sequence[tuple[str, int, int]], passes: Sequence[int]) -> Privacy:
    """`samples`: node, private samples read in an epoch, and how many of these are read again; by rank."""
    nodes = []
    for (node, num_read, num_repeated), count in zip(samples, passes, strict=True):
        different = num_read - num_repeated
        if different:
            num_releases = count * ceil(num_read / different)
            epsilon = compute_epsilon(noise, num_releases) if _has_accountant() else None
            nodes.append(NodePrivacy(node, different, num_releases, epsilon))
    return Privacy(noise.l2_norm_clip, noise.noise_multiplier, noise.delta, tuple(nodes))
