"""One rank's process on its machine: started over SSH, receives orders and sends events as lines.

Everything it prints is passed on in order. The process ends when its connection ends. A probe session that is
attached is a rank for one run only, and is released afterwards.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from csdctl.errors import CsdctlError, DeadlineError, NodeError, OutOfMemoryError
from csdctl.launch.diagnosis import MEMORY_REMEDY, is_noise
from csdctl.notify import make_printable
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Completed, Conversation, Session
from csdctl.worker.protocol.events import Event, Finished, event_from_line
from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.orders import Order, Release, order_to_line
from csdctl.worker.protocol.probe import READY

_READ_S = 3600.0
"""A read without a line is repeated after this long: the supervisor decides how long a rank may be silent."""
_EXIT_CODE_S = 5.0
"""How long to wait for the exit code after the output has ended."""
_SIGNAL = 128
_NO_CODE = 255
"""SSH returned no exit code."""


@dataclass(frozen=True)
class ProcessEnded:
    """A rank's process has ended; `error` holds the reason, `is_clean` whether it exited with 0."""

    rank: int
    node: str
    error: CsdctlError
    is_clean: bool = False


RankMessage = Event | ProcessEnded
OnMessage = Callable[[RankMessage], None]
AttachRank = Callable[[str, int], Conversation]
"""Make a probe session the given rank of the run in the given file on its machine, until `Release`."""


class RankProcess:
    """One rank; `send` may be called until the process has ended, `close` always."""

    def __init__(
        self,
        rank: int,
        session: Session,
        conversation: Conversation,
        log_path: Path,
        on_message: OnMessage,
        *,
        is_attached: bool = False,
    ) -> None:
        """Communicate with the process through `conversation`, which `session` opened.

        One thread calls `on_message` with every event, in order, and with the end of the process. A process
        that `is_attached` ends as a rank when it has finished, and its conversation stays open.
        """
        self.rank = rank
        self.node = session.name
        self._meter = session.meter
        self._on_message = on_message
        self._log_path = log_path
        self._is_closed = False
        self._is_attached = is_attached
        self._is_released = False
        """Whether the process no longer reads its lines as orders to a rank."""
        self._send_lock = threading.Lock()
        self._conversation = conversation
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, order: Order) -> None:
        """Send an order; a process that has ended ignores it, as its end is reported anyway."""
        with self._send_lock, contextlib.suppress(EOFError, CsdctlError):
            if not self._is_released:
                self._conversation.send_line(order_to_line(order))
            self._is_released |= isinstance(order, Release)

    def close(self) -> None:
        """End the process and everything it started, unless it was released."""
        if self._is_released:
            return
        self._is_closed = True
        with contextlib.suppress(CsdctlError):
            self._conversation.close()

    def _read(self) -> None:
        try:
            with self._log_path.open("a", encoding="utf-8", errors="replace") as log:
                self._read_lines(log)
        except OSError:  # a full disk is no reason to end a run
            self._read_lines(None)

    def _read_lines(self, log: IO[str] | None) -> None:
        error: CsdctlError
        is_clean = False
        while True:
            try:
                line = self._conversation.read_line(deadline_s=_READ_S)
            except DeadlineError:
                continue
            except EOFError:
                error, is_clean = self._read_exit()
                break
            except CsdctlError as failure:
                error = failure
                break
            except (OSError, ValueError):  # closed by `close`
                return
            if self._handle_event(line):
                continue
            if self._is_released and line == READY:
                error = NodeError(f"rank {self.rank} has been released", node=self.node)
                self._on_message(ProcessEnded(self.rank, self.node, error, is_clean=True))
                return
            self._log(line, log)
        if not self._is_closed:
            self._on_message(ProcessEnded(self.rank, self.node, error, is_clean))

    def _handle_event(self, line: str) -> bool:
        """Pass on the event in `line`; return False when `line` holds none."""
        try:
            event = event_from_line(line)
        except ProtocolError:
            return False
        if event is None:
            return False
        self._on_message(event)
        if self._is_attached and isinstance(event, Finished):
            self.send(Release())
        return True

    def _log(self, line: str, log: IO[str] | None) -> None:
        self._meter.record(TrafficClass.LOG, received=len(line) + 1)
        if log and line.strip() and not is_noise(line):
            with contextlib.suppress(OSError):
                log.write(make_printable(line.replace("\0", "")) + "\n")
                log.flush()

    def _read_exit(self) -> tuple[CsdctlError, bool]:
        """Return why the process ended, and whether it exited with 0."""
        try:
            done = self._conversation.wait(deadline_s=_EXIT_CODE_S)
        except CsdctlError as error:
            return error, False
        if done.stderr:  # of an attached process; the others write it to stdout
            with contextlib.suppress(OSError), self._log_path.open("ab") as log:
                log.write(make_printable(done.stderr.decode(errors="backslashreplace")).encode() + b"\n")
        return explain_exit(self.rank, self.node, done), done.exit_code == 0


def explain_exit(rank: int, node: str, done: Completed) -> CsdctlError:
    """Return why a rank's process ended, from its exit code."""
    signal = done.exit_code - _SIGNAL if done.exit_code < _NO_CODE else 0
    if signal == 9:
        return OutOfMemoryError(
            f"rank {rank} was killed by signal 9, most likely out of memory", node=node, remedy=MEMORY_REMEDY
        )
    if signal > 0:
        return NodeError(f"rank {rank} was killed by signal {signal}", node=node)
    if done.exit_code == _NO_CODE:
        return NodeError(f"rank {rank} or its SSH session was killed", node=node)
    return NodeError(
        f"rank {rank} exited with code {done.exit_code}", node=node, remedy=f"see the log of rank {rank}"
    )
