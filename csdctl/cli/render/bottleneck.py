"""The rank that holds the others back, as a line of the live view."""

from collections.abc import Sequence

from csdctl.cli.render.fleet_view import show_elapsed
from csdctl.reporting.bottleneck import Bottleneck, find_bottleneck
from csdctl.reporting.series import SeriesBuilder
from csdctl.worker.protocol.events import Event

INTERVAL_S, INTERVAL_SHARE = 5.0, 1 / 64
"""Between two looks at all that was recorded: at least, and as a share of the run so far. The latest part of
a long run changes slowly, and who begins to watch it reads all of it."""


class BottleneckLine:
    """Takes the events of a run, and tells who holds the others back, since when, and why."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """`nodes` of the ranks, in order."""
        self._nodes = nodes
        self._series = SeriesBuilder(nodes)
        self._start_s: float | None = None
        self._looked_at = 0.0
        self._bottleneck: Bottleneck | None = None
        self._said: tuple[int | None, str] | None = None

    def add(self, now: float, event: Event) -> str:
        """Add an event at `now`, in seconds; return a line if another rank, or another cause, is found."""
        if self._start_s is None:
            self._start_s = self._looked_at = now
        self._series.add(now, event)
        if now - self._looked_at < max(INTERVAL_S, INTERVAL_SHARE * (now - self._start_s)):
            return ""
        self._looked_at = now
        self._bottleneck = find_bottleneck(self._series.build(), is_now=True)
        found = self._bottleneck and (self._bottleneck.rank, self._bottleneck.cause)
        if not found or found == self._said:
            return ""
        self._said = found
        return self.describe(now)

    def describe(self, now: float) -> str:
        """Return who holds the others back, as a line; nothing where nobody does."""
        bottleneck = self._bottleneck
        if bottleneck is None or self._start_s is None:
            return ""
        if bottleneck.rank is None:
            return f"link: {bottleneck.why}"
        held_s = max(0.0, now - self._start_s - bottleneck.since_s)
        node = self._nodes[bottleneck.rank]
        held = f"{node} has held the others back for {show_elapsed(held_s)}"
        return f"{held} ({bottleneck.cause}): {bottleneck.why}"
