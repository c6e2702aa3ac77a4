"""The messages of all ranks as one sequence; a message whose handling is interrupted is not lost."""

from collections import deque
from collections.abc import Callable

from csdctl.supervision.rank_process import RankMessage
from csdctl.supervision.rank_processes import Restarted


class Inbox:
    """Messages to handle: postponed messages first, then new ones as they arrive."""

    def __init__(
        self,
        receive: Callable[[float], RankMessage | Restarted | None],
        on_arrival: Callable[[RankMessage | Restarted], None],
    ) -> None:
        """`receive` waits up to the given seconds; `on_arrival` is called once with every new message."""
        self._receive = receive
        self._on_arrival = on_arrival
        self._postponed: deque[RankMessage] = deque()
        self._unhandled: RankMessage | None = None

    def next(self, timeout_s: float) -> RankMessage | None:
        """Return the next message to handle, None when none is available in time."""
        if not self._postponed:
            return self.next_new(timeout_s)
        self._unhandled = self._postponed.popleft()
        return self._unhandled

    def next_new(self, timeout_s: float) -> RankMessage | None:
        """Return the next message that arrives, None when none arrives in time."""
        message = self._receive(timeout_s)
        if isinstance(message, Restarted):
            self._on_arrival(message)
            return None
        self._unhandled = message
        if message is not None:
            self._on_arrival(message)
        return message

    def postpone(self, message: RankMessage) -> None:
        """Return `message` from `next` again, after the messages postponed before it."""
        self._postponed.append(message)

    def mark_handled(self) -> None:
        """Record that the latest message from `next` needs no more handling."""
        self._unhandled = None

    def requeue_unhandled(self) -> None:
        """Return the latest message from `next` once more, before all others, unless it was handled.

        An interrupt may come at any point, even before the message was handled.
        """
        if self._unhandled:
            self._postponed.appendleft(self._unhandled)

    def discard(self, rank: int) -> None:
        """Forget the postponed messages of `rank`."""
        self._postponed = deque(message for message in self._postponed if message.rank != rank)
