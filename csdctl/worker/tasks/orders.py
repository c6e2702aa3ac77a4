"""The orders that a running rank receives: lines on its standard input, read by a thread.

When the input ends, csdctl has exited or ends the rank: the process exits immediately.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.orders import (
    FormGroup,
    PauseAtEpochEnd,
    Ping,
    Release,
    Stop,
    order_from_line,
)


class Orders:
    """The orders received so far, for the session and its task to act on."""

    def __init__(self, on_ping: Callable[[int], None], stream: TextIO | None = None) -> None:
        """`on_ping` is called by the thread with the number of each `Ping`."""
        self.is_stopping = False
        self.is_pausing = False
        self.on_group: Callable[[], None] = lambda: None
        """Called by the thread when a group is ordered: waiting in an earlier group is then pointless."""
        self._groups: queue.Queue[FormGroup] = queue.Queue()
        self._on_ping = on_ping
        self._stream = stream or sys.stdin
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next_group(self, timeout_s: float) -> FormGroup:
        """Return the latest group ordered; raises queue.Empty when none is ordered in time."""
        group = self._groups.get(timeout=timeout_s)
        while not self._groups.empty():
            group = self._groups.get()
        self.is_pausing = False
        return group

    def await_release(self) -> None:
        """Wait for `Release`: from then on, other code may read the input."""
        self._reader.join()

    @property
    def has_group(self) -> bool:
        """Whether a group was ordered that `next_group` has not returned yet."""
        return not self._groups.empty()

    def _read(self) -> None:
        for line in self._stream:
            try:
                order = order_from_line(line)
            except ProtocolError:
                continue
            if isinstance(order, FormGroup):
                self._groups.put(order)
                self.on_group()
            elif isinstance(order, PauseAtEpochEnd):
                self.is_pausing = True
            elif isinstance(order, Stop):
                self.is_stopping = True
            elif isinstance(order, Release):
                return
            elif isinstance(order, Ping):
                self._on_ping(order.number)
        os._exit(1)
