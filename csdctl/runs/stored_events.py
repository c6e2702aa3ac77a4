"""The events of a run as they were stored: read one by one, since a run of days has millions of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.worker.protocol.event_rules import check_event
from csdctl.worker.protocol.events import Event, event_from_line
from csdctl.worker.protocol.json_codec import ProtocolError, parse_json

MAX_LINE_BYTES = 4 << 20
"""More than any event, with the quotes escaped."""
MAX_TIME_S = 1e11
"""In the year 5138; a date can say it."""


class StoredEvents:
    """The events in a file, in order of arrival; every iteration reads the file from its beginning.

    A line that is no event of the run (truncated by a crash, damaged, edited) is left out and counted.
    """

    def __init__(self, path: Path, nodes: Sequence[str]) -> None:
        """`nodes` are the machines of the run's ranks, in order."""
        self._path, self._nodes = path, nodes
        self.num_unreadable = 0
        """Lines that the latest iteration has left out so far."""

    def __iter__(self) -> Iterator[Event]:
        return (event for _, event in self.with_times())

    def with_times(self) -> Iterator[tuple[float, Event]]:
        """Yield the Unix time of arrival and the event; raises InputError when there is no file."""
        self.num_unreadable = 0
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            raise InputError(
                f"run {self._path.parent.name} has no events", remedy="the run ended before training started"
            ) from None
        with file:
            while line := file.readline(MAX_LINE_BYTES):
                is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
                while not is_whole:  # the rest of a line that is too long
                    is_whole = (rest := file.readline(MAX_LINE_BYTES)).endswith(b"\n") or not rest
                    line = b""
                try:
                    stored = self._parse(line.decode(errors="replace"))
                except ProtocolError:
                    self.num_unreadable += 1
                    continue
                yield stored

    def _parse(self, line: str) -> tuple[float, Event]:
        """Return what `EventLog` wrote as one line; raises ProtocolError for anything else."""
        content = parse_json(line)
        if not isinstance(content, dict):
            raise ProtocolError("not an object")
        time_s, text = content.get("time"), content.get("line")
        if not isinstance(time_s, float | int) or not isinstance(text, str) or not 0 <= time_s < MAX_TIME_S:
            raise ProtocolError("not a time and an event")
        event = event_from_line(text)
        if event is None:
            raise ProtocolError("not an event")
        check_event(event, self._nodes)
        return time_s, event
