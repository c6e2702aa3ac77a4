"""The state of one group of ranks, as its members report it; pure."""

from dataclasses import dataclass, field

from csdctl.worker.protocol.events import (
    EpochEnd,
    Evaluating,
    Event,
    Finished,
    Joined,
    LinkLost,
    Paused,
    Pong,
    Progress,
    Ready,
)

PROGRESS = (Ready, Joined, Progress, Evaluating, EpochEnd, Finished, Paused)
"""Events of rank 0 that show that the run does not hang."""


@dataclass
class GroupState:
    """The ranks that train together; every loss, and every return of a rank, leads to a new group."""

    generation: int
    ranks: tuple[int, ...]
    last_progress: float
    """When rank 0 last reported progress, at first when the group was formed; times are monotonic seconds.

    No step ends without rank 0. What other ranks report does not count: a node could report for ever.
    """
    joined: set[int] = field(default_factory=set)
    paused: set[int] = field(default_factory=set)
    unlinked: set[int] = field(default_factory=set)
    """Members that lost the connection to the others."""
    first_unlinked: int | None = None
    """The one that said so first."""
    is_pausing: bool = False
    """Whether the group was ordered to end with the epoch."""
    pinged: dict[int, float] = field(default_factory=dict)
    """When each rank with an unanswered ping was pinged because others wait for it."""
    awaited: set[int] = field(default_factory=set)
    """The ranks for which rank 0 said that it waits, since its last progress."""
    answered: dict[int, float] = field(default_factory=dict)
    """When each rank last answered a ping or became ready, members or not."""

    def record_arrival(self, event: Event, now: float) -> None:
        """Update the state that depends only on the arrival of `event`, before it is handled."""
        if isinstance(event, PROGRESS) and event.rank == 0:
            self.last_progress = now
        if isinstance(event, PROGRESS) and event.rank == 0:
            self.awaited = set()
        if isinstance(event, Ready | Pong):
            self.answered[event.rank] = now
        elif isinstance(event, LinkLost) and event.generation == self.generation:
            self.unlinked.add(event.rank)
            self.first_unlinked = event.rank if self.first_unlinked is None else self.first_unlinked

    @property
    def have_all_joined(self) -> bool:
        """Whether every member has reported that it is connected to the others."""
        return self.joined == set(self.ranks)

    @property
    def have_all_paused(self) -> bool:
        """Whether every member waits for the next group."""
        return self.paused == set(self.ranks)

    def has_answered_since(self, rank: int, time: float) -> bool:
        """Return whether `rank` has answered at `time` or later."""
        return self.answered.get(rank, 0.0) >= time

    def answer_delays_s(self, since: float) -> list[float]:
        """Return how long after `since` each rank answered that has answered."""
        return [answered - since for answered in self.answered.values() if answered > since]

    def last_message(self, rank: int) -> float:
        """Return when `rank` last answered or rank 0 reported progress, whichever is later."""
        return max(self.last_progress, self.answered.get(rank, 0.0))

    def drop_answered_pings(self) -> None:
        """Keep in `pinged` only the pings that wait for an answer."""
        self.pinged = {
            rank: pinged for rank, pinged in self.pinged.items() if not self.has_answered_since(rank, pinged)
        }
