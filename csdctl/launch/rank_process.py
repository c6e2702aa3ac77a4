"""A rank's process on its machine, started over SSH and spoken to by lines.

What it prints is passed on in order of arrival. It ends when its connection ends. A probe session that is
enlisted is a rank for one run only, and is released.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from csdctl.errors import CsdctlError, DeadlineError, NodeError, OutOfMemoryError
from csdctl.launch.diagnosis import MEMORY_REMEDY, is_noise
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Completed, Conversation, Session
from csdctl.worker.protocol.events import Event, Finished, event_from_line
from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.orders import Order, Release, order_to_line
from csdctl.worker.protocol.probe import READY

_LISTEN_S = 3600.0
_END_S = 5.0
_SIGNAL = 128
_NO_CODE = 255
"""SSH gave no exit code."""


@dataclass(frozen=True)
class ProcessEnded:
    """A rank's process is no more; `error` says why, `is_clean` whether it left as it should."""

    rank: int
    node: str
    error: CsdctlError
    is_clean: bool = False


RankMessage = Event | ProcessEnded
AttachRank = Callable[[str, int], Conversation]
"""Makes a probe session the rank of this number of the run in this file (of its machine), until `Release`."""


class RankProcess:
    """One rank; `order` may be called until the process has ended, `close` always."""

    def __init__(
        self,
        rank: int,
        session: Session,
        conversation: Conversation,
        log_path: Path,
        hear: Callable[[RankMessage], None],
        *,
        is_enlisted: bool = False,
    ) -> None:
        """Speak to the process by `conversation`, which `session` opened.

        `hear` is called with everything the process says, in order, and with its end, by one thread. One that
        `is_enlisted` ends as a rank when it has finished, and its conversation goes on with somebody else.
        """
        self.rank = rank
        self.node = session.name
        self._meter = session.meter
        self._hear = hear
        self._log_path = log_path
        self._is_closed = False
        self._is_enlisted = is_enlisted
        self._is_released = False
        """Whether what is said to the process is no longer said to a rank."""
        self._saying = threading.Lock()
        self._conversation = conversation
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def order(self, order: Order) -> None:
        """Tell the rank something; what ended does not hear it, and its end is a notice anyway."""
        with self._saying, contextlib.suppress(EOFError, CsdctlError):
            if not self._is_released:
                self._conversation.send_line(order_to_line(order))
            self._is_released |= isinstance(order, Release)

    def close(self) -> None:
        """End the process, and whatever it started; one that has been released stays."""
        if self._is_released:
            return
        self._is_closed = True
        with contextlib.suppress(CsdctlError):
            self._conversation.close()

    def _read(self) -> None:
        try:
            with self._log_path.open("a", encoding="utf-8", errors="replace") as log:
                self._read_lines(log)
        except OSError:  # no room for a log is no reason to end a run
            self._read_lines(None)

    def _read_lines(self, log: IO[str] | None) -> None:
        error: CsdctlError
        is_clean = False
        while True:
            try:
                line = self._conversation.read_line(deadline_s=_LISTEN_S)
            except DeadlineError:
                continue
            except EOFError:
                error, is_clean = self._how_it_ended()
                break
            except CsdctlError as one:
                error = one
                break
            except (OSError, ValueError):  # closed from here
                return
            try:
                event = event_from_line(line)
            except ProtocolError:
                event = None
            if event is not None:
                self._hear(event)
                if self._is_enlisted and isinstance(event, Finished):
                    self.order(Release())
                continue
            if self._is_released and line == READY:
                error = NodeError(f"rank {self.rank} has been released", node=self.node)
                self._hear(ProcessEnded(self.rank, self.node, error, is_clean=True))
                return
            self._meter.record(TrafficClass.LOG, received=len(line) + 1)
            if log and line.strip() and not is_noise(line):
                with contextlib.suppress(OSError):
                    log.write(line.replace("\0", "") + "\n")
                    log.flush()
        if not self._is_closed:
            self._hear(ProcessEnded(self.rank, self.node, error, is_clean))

    def _how_it_ended(self) -> tuple[CsdctlError, bool]:
        try:
            done = self._conversation.wait(deadline_s=_END_S)
        except CsdctlError as error:
            return error, False
        if done.stderr:  # of one that is enlisted; others write it into the same stream
            with contextlib.suppress(OSError), self._log_path.open("ab") as log:
                log.write(done.stderr + b"\n")
        return explain_end(self.rank, self.node, done), done.exit_code == 0


def explain_end(rank: int, node: str, done: Completed) -> CsdctlError:
    """Why a rank's process ended, from its exit code."""
    number = done.exit_code - _SIGNAL if done.exit_code < _NO_CODE else 0
    if number == 9:
        return OutOfMemoryError(
            f"rank {rank} was killed by signal 9, most likely out of memory", node=node, remedy=MEMORY_REMEDY
        )
    if number > 0:
        return NodeError(f"rank {rank} was killed by signal {number}", node=node)
    if done.exit_code == _NO_CODE:
        return NodeError(f"rank {rank} was killed, or its SSH session was", node=node)
    return NodeError(
        f"rank {rank} ended with exit code {done.exit_code}", node=node, remedy=f"see the log of rank {rank}"
    )
