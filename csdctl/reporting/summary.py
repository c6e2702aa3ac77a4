"""The results of a run, from its events and its manifest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from csdctl.reporting.differential_privacy import Privacy, measure_privacy
from csdctl.worker.protocol.events import (
    STOPPED,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    NodeLost,
    Rebalanced,
)


@dataclass(frozen=True)
class RankSummary:
    """One rank over the whole run."""

    rank: int
    node: str
    batch_size: int
    num_private: int
    num_public: int
    samples_per_s: float
    alone_samples_per_s: float | None
    """Measured in tuning, without synchronization."""
    compute_s: float
    wait_s: float

    @property
    def waiting(self) -> float:
        """Waiting time as a share of compute and waiting time, 0…1."""
        total_s = self.compute_s + self.wait_s
        return self.wait_s / total_s if total_s else 0.0


@dataclass(frozen=True)
class RunSummary:
    """The whole run."""

    run_id: str
    state: str
    """'done' with a completion record from every rank of the last group, 'stopped' when the user stopped it,
    else 'failed'."""
    emulated: bool
    method: str
    num_ranks: int
    global_batch: int
    epochs: int
    steps: int
    samples: int
    training_s: float
    samples_per_s: float
    """Over whole epochs, including their ends: comparing weights, evaluation, checkpoints."""
    step_samples_per_s: float
    """Over the steps alone, as `predicted_samples_per_s`."""
    predicted_samples_per_s: float | None
    alone_samples_per_s: float | None
    efficiency: float | None
    """samples_per_s over the sum of the rates of each rank alone, 0…1."""
    loss: float | None
    accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    identical_weights: bool
    failures: tuple[str, ...]
    lost_nodes: tuple[str, ...]
    """Nodes that were lost during the run, including those that rejoined."""
    num_private_unread: int
    """Private samples, counted once per epoch, that were not read because their node was absent."""
    num_rebalanced: int
    """The number of times that batch sizes changed."""
    ranks: tuple[RankSummary, ...]
    privacy: Privacy | None = None
    """The guarantee for private samples; None without noise."""


def summarize(run_id: str, manifest: dict[str, Any], events: Iterable[Event]) -> RunSummary:
    """Add up a run; `manifest` is its manifest.json."""
    kept = list(events)
    plan = manifest["plan"]
    epochs = [event for event in kept if isinstance(event, EpochEnd)]
    of_host = [event for event in epochs if event.rank == 0]
    training_s = sum(event.wall_s for event in of_host)
    samples = sum(event.global_samples for event in of_host)
    ranks = tuple(
        _rank(
            number, rank, manifest["placement"][number], [event for event in epochs if event.rank == number]
        )
        for number, rank in enumerate(plan["ranks"])
    )
    # No event covers the time before a loss or a resumption.
    timed = sum(event.stepped_samples or event.global_samples for event in of_host)
    speed = timed / training_s if training_s else 0.0
    steps_s = sum(event.compute_s + event.wait_s for event in of_host)
    alone = [rank.alone_samples_per_s for rank in ranks if rank.batch_size]
    all_alone = sum(rate for rate in alone if rate) if all(alone) else None
    last = of_host[-1] if of_host else None
    return RunSummary(
        run_id=run_id,
        state=_state(kept, len(ranks)),
        emulated=bool(plan.get("emulated")),
        method=plan["method"],
        num_ranks=len(ranks),
        global_batch=sum(rank.batch_size for rank in ranks),
        epochs=len(of_host),
        steps=sum(event.steps for event in of_host),
        samples=samples,
        training_s=training_s,
        samples_per_s=speed,
        step_samples_per_s=timed / steps_s if steps_s else 0.0,
        predicted_samples_per_s=manifest.get("predicted_samples_per_s"),
        alone_samples_per_s=all_alone,
        efficiency=speed / all_alone if all_alone and speed else None,
        loss=last.loss if last else None,
        accuracy=last.accuracy if last else None,
        validation_loss=last.validation_loss if last else None,
        validation_accuracy=last.validation_accuracy if last else None,
        identical_weights=_identical(kept, len(ranks)),
        failures=tuple(f"{event.node}: {event.message}" for event in kept if isinstance(event, Failed)),
        lost_nodes=tuple(dict.fromkeys(event.node for event in kept if isinstance(event, NodeLost))),
        num_private_unread=sum(event.num_lost for event in of_host),
        num_rebalanced=sum(isinstance(event, Rebalanced) for event in kept),
        ranks=ranks,
        privacy=measure_privacy(manifest, kept),
    )


def _state(events: Sequence[Event], num_ranks: int) -> str:
    """Return the state of the ranks of the last group."""
    joined = [event for event in events if isinstance(event, Joined)]
    members = {int(rank) for rank in joined[-1].batch_sizes} if joined else set(range(num_ranks))
    last: dict[int, Finished] = {}
    for event in events:
        if isinstance(event, Joined):
            last.pop(event.rank, None)  # the run was resumed
        elif isinstance(event, Finished):
            last[event.rank] = event
    if members - set(last):
        return "failed"
    return "stopped" if any(event.reason == STOPPED for event in last.values()) else "done"


def _rank(number: int, rank: dict[str, Any], placed: dict[str, Any], epochs: list[EpochEnd]) -> RankSummary:
    wall_s = sum(event.wall_s for event in epochs)
    samples = sum(event.samples for event in epochs)
    return RankSummary(
        rank=number,
        node=rank["node"],
        batch_size=rank["batch_size"],
        num_private=placed["num_private"],
        num_public=placed["num_public"],
        samples_per_s=samples / wall_s if wall_s else 0.0,
        alone_samples_per_s=rank.get("samples_per_s"),
        compute_s=sum(event.compute_s for event in epochs),
        wait_s=sum(event.wait_s for event in epochs),
    )


def _identical(events: Sequence[Event], num_ranks: int) -> bool:
    """Return whether at the end of every epoch all ranks of the group reported the same weights."""
    members = set(range(num_ranks))
    expected: dict[int, set[int]] = {}
    hashes: dict[int, dict[int, str]] = {}
    for event in events:
        if isinstance(event, Joined):
            members = {int(rank) for rank in event.batch_sizes}
        elif isinstance(event, EpochEnd):
            expected[event.epoch] = members
            hashes.setdefault(event.epoch, {})[event.rank] = event.weights_hash
    return bool(hashes) and all(
        expected[epoch] <= set(by_rank) and len(set(by_rank.values())) == 1
        for epoch, by_rank in hashes.items()
    )
