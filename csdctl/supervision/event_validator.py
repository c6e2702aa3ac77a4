"""What one rank may report, given the orders it was sent: everything else is a violation of the protocol.

A node may run anything in place of the worker. What it sends is believed only as far as it concerns the node
itself, and only in an order in which a worker sends it.
"""

from collections import Counter
from collections.abc import Sequence

from csdctl.worker.protocol.events import (
    FROM_CSDCTL,
    FROM_MPI,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    Misbehaved,
    Paused,
    Pong,
    Progress,
    Ready,
    WaitingFor,
    check_event,
    check_sender,
)
from csdctl.worker.protocol.json_codec import ProtocolError, shorten
from csdctl.worker.protocol.orders import FormGroup, Order, Ping


class Allowance:
    """An amount that grows with time, up to `burst`, and that is spent."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left = burst
        self._updated: float | None = None

    def spend(self, amount: float, now: float) -> float:
        """Spend `amount` at the time `now`, in monotonic seconds; return the seconds until it is available.

        0.0: it was available at once.
        """
        elapsed_s = now - self._updated if self._updated is not None else 0.0
        self._updated = now
        self._left = min(self._burst, self._left + elapsed_s * self._per_s) - amount
        return max(0.0, -self._left / self._per_s)


EVENTS_PER_S, MAX_EVENTS_AT_ONCE = 100, 10_000
"""A worker sends two in a second, and several at the end of an epoch; what waits in a connection while csdctl
is stopped arrives at once."""
CHARS_PER_EVENT = 1000
"""An event of this length counts twice."""
WAITING_PER_S, MAX_WAITING_AT_ONCE = 1, 100
"""A worker says every five seconds that it waits; csdctl then tells the user, and asks the other ranks."""


class EventValidator:
    """Checks the events of one process of rank `rank`; `nodes` are the machines of all ranks, in order."""

    def __init__(self, rank: int, nodes: Sequence[str], *, num_epochs: int, must_join: bool) -> None:
        """`num_epochs`: of the run; `must_join`: its task reports `Joined` first of all."""
        self._rank, self._nodes = rank, nodes
        self._num_epochs = num_epochs
        self._allowance = Allowance(EVENTS_PER_S, MAX_EVENTS_AT_ONCE)
        self._waiting_allowance = Allowance(WAITING_PER_S, MAX_WAITING_AT_ONCE)
        self._groups: dict[int, tuple[int, ...]] = {}
        """The ranks of every group that was ordered, by generation."""
        self._pings: Counter[int] = Counter()
        self._reported: set[tuple[type[Event], int]] = set()
        """Events that come once in a process or group, with the generation of the group."""
        self._must_join = must_join
        self._has_finished = self._has_failed = False
        self._epochs_ended = 0

    def note_order(self, order: Order) -> None:
        """Take note of an order, before it is sent."""
        if isinstance(order, FormGroup):
            self._groups[order.generation] = order.ranks
        elif isinstance(order, Ping):
            self._pings[order.number] += 1

    def check(self, event: Event, num_chars: int, now: float) -> None:
        """Raise ProtocolError unless the rank may send `event` now; it was a line of `num_chars`."""
        if self._allowance.spend(1 + num_chars / CHARS_PER_EVENT, now) > 0:
            raise _violation(
                event, f"at most {EVENTS_PER_S} events of {CHARS_PER_EVENT} characters per second"
            )
        if isinstance(event, WaitingFor) and self._waiting_allowance.spend(1, now) > 0:
            raise _violation(event, f"at most {WAITING_PER_S} per second")
        check_sender(event, self._rank, self._nodes)
        if isinstance(event, FROM_CSDCTL + FROM_MPI):
            raise _violation(event, "an event of a rank that trains")
        check_event(event, self._nodes)
        self._check_order(event)

    def _check_order(self, event: Event) -> None:
        """Raise ProtocolError for an event that cannot follow the events and orders before it."""
        if isinstance(event, Pong):
            self._check_answer(event)
        elif self._has_failed:
            raise _violation(event, "nothing after Failed")
        elif isinstance(event, Failed):
            self._has_failed = True
        elif self._has_finished:
            raise _violation(event, "nothing after Finished")
        elif isinstance(event, Ready):
            self._check_first(event, 0)
        elif not self._groups:
            raise _violation(event, "nothing but Ready before a group is formed")
        else:
            self._check_order_in_a_group(event)

    def _check_order_in_a_group(self, event: Event) -> None:
        """Raise ProtocolError for an event that a rank with a group cannot send now."""
        if isinstance(event, Joined | LinkLost | Paused):
            self._check_membership(event)
        elif self._must_join and not isinstance(event, WaitingFor | Misbehaved):
            raise _violation(event, "Joined first")
        elif isinstance(event, Progress | EpochEnd):
            self._check_epoch(event)
        elif isinstance(event, Finished):
            self._has_finished = True

    def _check_epoch(self, event: Progress | EpochEnd) -> None:
        """Check that epochs follow each other from where the rank joined, each with one end."""
        first, last = self._epochs_ended + 1, max(self._num_epochs, self._epochs_ended + 1)
        if not first <= event.epoch <= last:
            raise _violation(event, f"an epoch from {first} to {last}", event.epoch)
        if isinstance(event, EpochEnd):
            self._epochs_ended = event.epoch

    def _check_answer(self, pong: Pong) -> None:
        if not self._pings[pong.number]:
            raise _violation(pong, "one answer to each ping")
        self._pings[pong.number] -= 1

    def _check_membership(self, event: Joined | LinkLost | Paused) -> None:
        """Check what a rank reports once of a group that it was ordered to join."""
        if event.generation not in self._groups:
            raise _violation(event, f"generation {max(self._groups)}", event.generation)
        self._check_first(event, event.generation)
        if isinstance(event, Joined):
            ranks = {str(rank) for rank in self._groups[event.generation]}
            if event.batch_sizes.keys() != ranks:
                raise _violation(event, "the batch sizes of the ranks of the group", list(event.batch_sizes))
            self._must_join = False
            self._epochs_ended = max(0, event.epoch - 1)
        elif isinstance(event, Paused) and self._must_join:
            raise _violation(event, "Joined first")

    def _check_first(self, event: Event, generation: int) -> None:
        if (type(event), generation) in self._reported:
            raise _violation(event, f"one {type(event).__name__}")
        self._reported.add((type(event), generation))


def _violation(event: Event, expected: str, received: object = None) -> ProtocolError:
    name = type(event).__name__
    return ProtocolError(
        f"{name}: expected {expected}" + (f", received {shorten(received)}" if received else "")
    )
