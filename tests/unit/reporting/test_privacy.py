"""ε against closed forms, and which of a run's events count as releases."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from csdctl.errors import InputError
from csdctl.placement.equation1 import Placed
from csdctl.reporting import privacy
from csdctl.reporting.privacy import (
    add_flows,
    check_accountant,
    compute_epsilon,
    count_passes,
    measure_privacy,
    plan_privacy,
)
from csdctl.runs.ledger import LedgerEntry
from csdctl.worker.protocol.events import (
    EARLY_STOPPING,
    MAX_STEPS,
    STOPPED,
    EpochEnd,
    Event,
    Finished,
    Joined,
    Progress,
)
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import RankSpec, Runtime
from tests.unit.reporting.test_results import MANIFEST as PLANNED
from tests.unit.runs.manifests import spec_of

NOISE = Noise(1.0, 8.0, 1e-5)


def test_flows_between_servers_are_told_from_those_of_a_server_and_its_nodes() -> None:
    pairs = [("host", "a/csd0"), ("host", "b"), ("b", "b/csd0"), ("c", "b")]
    entries = [LedgerEntry(0.0, "train", "run", *pair, "gradient", 100) for pair in pairs]
    between = {(flow.sender, flow.receiver) for flow in add_flows(entries) if flow.is_between_servers}
    assert between == {("host", "b"), ("c", "b")}
    flat = [LedgerEntry(0.0, "train", "run", "host", "csd0", "gradient", 100)]
    assert not any(flow.is_between_servers for flow in add_flows(flat))


def normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def delta_of(epsilon: float, deviation: float, sensitivity: float) -> float:
    """δ of the Gaussian mechanism at ε (Balle and Wang, 2018, theorem 8)."""
    half, ratio = sensitivity / (2 * deviation), epsilon * deviation / sensitivity
    return normal(half - ratio) - math.exp(epsilon) * normal(-half - ratio)


@pytest.mark.parametrize(("multiplier", "count"), [(8.0, 1), (8.0, 10), (20.0, 100), (2.0, 3)])
def test_epsilon_is_that_of_the_gaussian_mechanism_with_all_sums_at_once(
    multiplier: float, count: int
) -> None:
    epsilon = compute_epsilon(replace(NOISE, noise_multiplier=multiplier), count)
    # k sums that a replaced sample moves by 2 each are one vector that it moves by 2·√k.
    assert delta_of(epsilon, multiplier, 2 * math.sqrt(count)) == pytest.approx(NOISE.delta, rel=1e-4)


def test_missing_accountant_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_accountant()
    monkeypatch.setattr(privacy, "has_accountant", lambda: False)
    with pytest.raises(InputError, match="dp-accounting, which is not installed") as caught:
        check_accountant()
    assert caught.value.remedy.startswith("pip install '.[privacy]' in a clone of csdctl")
    guarantee = measure_privacy(MANIFEST, count_passes([joined(1), ended(1), finished()], 3))
    assert guarantee
    assert [(node.num_releases, node.epsilon) for node in guarantee.nodes] == [(1, None), (3, None)]


def joined(epoch: int, step: int = 0, members: Iterable[int] = (0, 1, 2)) -> Joined:
    """Rank 0 begins with these members."""
    return Joined(0, "host", epoch, step, 10, 0, {str(rank): 4 for rank in members}, is_start=True)


def changed(epoch: int, step: int, *members: int, lost: tuple[int, ...] = ()) -> Joined:
    """Rank 0 goes on with these members."""
    return replace(joined(epoch, step, members), is_start=False, lost=tuple((rank, "") for rank in lost))


def ended(epoch: int) -> EpochEnd:
    return EpochEnd(0, "host", epoch, 10, 100, 1.0, 1.0, 2.0, "hash")


def finished(reason: str = "") -> Finished:
    return Finished(0, "host", 1, 10, "hash", 1, reason=reason)


PROGRESS = Progress(0, "host", 1, 1, 1, 1, 1.0, 1.0, 1.0)
END_3 = [ended(3), finished()]

SEQUENCES: dict[str, tuple[list[Event], int | list[int]]] = {
    "nothing": ([], 0),
    "three epochs": ([joined(1), ended(1), ended(2), ended(3), finished()], 3),
    "with progress reported": ([joined(1), PROGRESS, ended(1), PROGRESS, ended(2), finished()], 2),
    "ended by early stopping": ([joined(1), ended(1), ended(2), finished(EARLY_STOPPING)], 2),
    "ended within an epoch": ([joined(1), ended(1), ended(2), finished(MAX_STEPS)], 2),
    "stopped within the second epoch": ([joined(1), ended(1), finished(STOPPED)], 2),
    "a new process of rank 0 in an epoch": ([joined(1), PROGRESS, joined(1, 3), ended(1), finished()], 2),
    "a new one in the second epoch": ([joined(1), ended(1), joined(2, 3), ended(2), finished()], 3),
    "rank 0 begins alone, and the others join it": (
        [joined(1), PROGRESS, joined(1, 3, (0,)), changed(1, 3, 0, 1), changed(1, 5, 0, 1, 2), *END_3],
        2,
    ),
    "csdctl killed in the second epoch, resumed there": (
        [joined(1), ended(1), PROGRESS, joined(2, 3), ended(2), finished()],
        3,
    ),
    "csdctl killed, and the ranks continued unreported": ([joined(1), joined(3, 2), ended(3), finished()], 4),
    "resumed from a checkpoint before": (
        [joined(1), ended(1), ended(2), PROGRESS, joined(2, 5), ended(2), ended(3), finished()],
        5,
    ),
    "events break off after an epoch": ([joined(1), ended(1)], 2),
    "a node is lost, and comes back between two epochs": (
        [joined(1), changed(1, 3, 0, 1), ended(1), ended(2), changed(3, 0, 0, 1, 2), *END_3],
        [3, 3, 2],
    ),
    "a node is lost in the first step after an epoch": (
        [joined(1), ended(1), changed(2, 1, 0, 1), ended(2), finished()],
        2,
    ),
    "a node is lost at the end of an epoch": (
        [joined(1), ended(1), changed(2, 0, 0, 1), ended(2), finished()],
        [2, 2, 1],
    ),
    "a node comes back in the epoch, and reads the step in which it was lost again": (
        [joined(1), changed(1, 3, 0, 1), changed(1, 5, 0, 1, 2), ended(1), finished()],
        [1, 1, 2],
    ),
    "a node is lost and back at once": (
        [joined(1), changed(1, 3, 0, 1, 2, lost=(2,)), ended(1), finished()],
        [1, 1, 2],
    ),
    "a node comes in the second epoch": (
        [joined(1, 0, (0, 1)), ended(1), changed(2, 3, 0, 1, 2), ended(2), finished()],
        [2, 2, 1],
    ),
    "resumed on another server, without the events before": (
        [replace(joined(3, 2), total_steps=22), ended(3), finished()],
        4,
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_pass_that_may_have_begun_counts(name: str) -> None:
    events, expected = SEQUENCES[name]
    of_ranks = expected if isinstance(expected, list) else [expected] * 3
    assert count_passes(events, 3).finish() == of_ranks


PRIVATE = [
    Placed("host", 60, 0, 0, 600),
    Placed("csd0", 10, 40, 600, 660),
    Placed("csd1", 10, 25, 660, 660, 15),
]
MANIFEST = PLANNED.model_copy(update={"noise": NOISE, "placed": PRIVATE})


def test_repeated_samples_are_in_more_sums() -> None:
    guarantee = measure_privacy(MANIFEST, count_passes(SEQUENCES["three epochs"][0], 3))
    assert guarantee
    assert [(node.node, node.num_private, node.num_releases) for node in guarantee.nodes] == [
        ("csd0", 40, 3),
        ("csd1", 10, 9),
    ]
    assert guarantee.nodes[1].epsilon == compute_epsilon(NOISE, 9)


RANKS = (
    RankSpec(0, "host", 4, Runtime(1), None, None, 0, 100),
    RankSpec(1, "csd0", 4, Runtime(1), None, None, 40, 0),
    RankSpec(2, "csd1", 4, Runtime(1), None, None, 25, 0, num_repeated=15),
)


def test_planned_privacy_covers_all_epochs_and_earlier_releases_of_a_resumed_run() -> None:
    spec = spec_of(epochs=4, ranks=RANKS, noise=NOISE)
    new, resumed = plan_privacy(spec, []), plan_privacy(spec, [joined(1), ended(1), PROGRESS])
    assert new
    assert resumed
    assert [node.num_releases for node in new.nodes] == [4, 12]
    assert [node.num_releases for node in resumed.nodes] == [5, 15]
