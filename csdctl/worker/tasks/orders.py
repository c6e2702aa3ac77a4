"""What csdctl tells a running rank: lines on its standard input, taken in by a thread.

When the input ends, csdctl is gone or wants the rank gone: it leaves at once.
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
    """The orders received so far; what they mean is up to who asks."""

    def __init__(self, answer: Callable[[int], None], stream: TextIO | None = None) -> None:
        """`answer` is called, by the thread, with the number of each `Ping`."""
        self.is_stopping = False
        self.is_pausing = False
        self.on_group: Callable[[], None] = lambda: None
        """Called by the thread when a group is ordered: whoever waits in an earlier one waits in vain."""
        self._groups: queue.Queue[FormGroup] = queue.Queue()
        self._answer = answer
        self._stream = stream or sys.stdin
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next_group(self, timeout_s: float) -> FormGroup:
        """The latest group ordered; raises queue.Empty when none came in time."""
        group = self._groups.get(timeout=timeout_s)
        while not self._groups.empty():
            group = self._groups.get()
        self.is_pausing = False
        return group

    def await_release(self) -> None:
        """Wait for `Release`: from then on the input is for others to read."""
        self._reader.join()

    @property
    def has_group(self) -> bool:
        """Whether a group was ordered that nobody has taken yet."""
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
                self._answer(order.number)
        os._exit(1)
