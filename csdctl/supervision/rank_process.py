"""One rank's process on its machine: started over SSH, receives orders and sends events as lines.

Every event is checked here, before anything acts on it; a rank that sends an invalid one is lost. All other
output goes to the log, up to a limit. The process ends when its connection ends. A probe session that is
attached is a rank for one run only, and is released afterwards.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from csdctl.errors import CsdctlError, DeadlineError, NodeError, OutOfMemoryError
from csdctl.launch.diagnosis import MEMORY_REMEDY, is_noise
from csdctl.runs.capped_log import MAX_LOG_BYTES, CappedLog
from csdctl.supervision import failures
from csdctl.supervision.event_validator import Allowance, EventValidator
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Completed, Conversation, Session
from csdctl.worker.protocol.events import UNKNOWN_NODE, Event, Failed, Finished, event_from_line
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
_LOG_BYTES_PER_S = 1 << 20
"""A rank that prints more waits, once it has printed MAX_LOG_BYTES: its output must not occupy the host."""
_LINE_BYTES = 100
"""What a line costs besides its length."""


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
        validator: EventValidator,
        log: CappedLog,
        on_message: OnMessage,
        *,
        is_attached: bool = False,
    ) -> None:
        """Communicate with the process through `conversation`, which `session` opened.

        `validator` judges its events, `log` gets its other output. One thread calls `on_message` with every
        event, in order, and with the end of the process. A process that `is_attached` ends as a rank when it
        has finished, and its conversation stays open.
        """
        self.rank = rank
        self.node = session.name
        self._meter = session.meter
        self._on_message = on_message
        self._validator = validator
        self._log = log
        self._log_allowance = Allowance(_LOG_BYTES_PER_S, MAX_LOG_BYTES)
        self._is_closed = threading.Event()
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
                self._validator.note_order(order)
                self._conversation.send_line(order_to_line(order))
            self._is_released |= isinstance(order, Release)

    def close(self) -> None:
        """End the process and everything it started, unless it was released."""
        if self._is_released:
            return
        self._is_closed.set()
        with contextlib.suppress(CsdctlError):
            self._conversation.close()

    def _read(self) -> None:
        with contextlib.closing(self._log):
            self._read_lines()

    def _read_lines(self) -> None:
        error: CsdctlError
        is_clean = False
        while True:
            try:
                line = self._conversation.read_line(deadline_s=_READ_S)
                if self._handle_event(line):
                    continue
            except DeadlineError:
                continue
            except EOFError:
                error, is_clean = self._read_exit()
                break
            except CsdctlError as failure:
                error = failure
                break
            except ProtocolError as violation:
                error = failures.misbehaved(self.node, violation)
                break
            except (OSError, ValueError) as failure:  # closed by `close`, most likely
                error = NodeError(f"its output cannot be read: {failure}", node=self.node)
                break
            if self._is_released and line == READY:
                error = NodeError(f"rank {self.rank} has been released", node=self.node)
                self._on_message(ProcessEnded(self.rank, self.node, error, is_clean=True))
                return
            self._handle_output(line)
        if not self._is_closed.is_set():
            self._on_message(ProcessEnded(self.rank, self.node, error, is_clean))

    def _handle_event(self, line: str) -> bool:
        """Pass on the event in `line`; return False when `line` holds none. Raises ProtocolError."""
        event = event_from_line(line)
        if event is None:
            return False
        if isinstance(event, Failed) and event.node == UNKNOWN_NODE:
            event = replace(event, node=self.node)
        self._validator.check(event, len(line), time.monotonic())
        self._on_message(event)
        if self._is_attached and isinstance(event, Finished):
            self.send(Release())
        return True

    def _handle_output(self, line: str) -> None:
        self._meter.record(TrafficClass.LOG, received=len(line) + 1)
        if line.strip() and not is_noise(line):
            self._log.write(line.encode(errors="replace"))
        delay_s = self._log_allowance.spend(_LINE_BYTES + len(line), time.monotonic())
        if delay_s:  # the rank's pipe and connection fill, and it waits
            self._is_closed.wait(delay_s)

    def _read_exit(self) -> tuple[CsdctlError, bool]:
        """Return why the process ended, and whether it exited with 0."""
        try:
            done = self._conversation.wait(deadline_s=_EXIT_CODE_S)
        except CsdctlError as error:
            return error, False
        if done.stderr:  # of an attached process; the others write it to stdout
            for line in done.stderr.splitlines():
                self._log.write(line)
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
