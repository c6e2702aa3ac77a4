"""The processes of a run's ranks, at most one for each rank: start, receive, drop, restart, close.

One thread calls all methods. A process that was restarted in another thread arrives as a message, before what
it sends.
"""

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from csdctl.errors import CsdctlError, DeadlineError, NodeError, OutOfMemoryError
from csdctl.runs.directory import MAX_LOG_BYTES, CappedLog
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Completed, Conversation, Session
from csdctl.worker.protocol import events
from csdctl.worker.protocol.json_codec import ProtocolError, shorten
from csdctl.worker.protocol.orders import Order, Ping, order_to_line

CHARS_PER_EVENT = 1000
"""An event of this length counts twice."""
CHECK_WORKER = "check that machine: its worker is damaged or is not csdctl's"
MEMORY_REMEDY = "use a smaller batch size, such as by `csdctl tune`, or a machine with more memory"
_NOISE = ("All log messages before absl", "oneDNN custom operations are on", "rebuild TensorFlow with")
"""Parts of lines that TensorFlow prints at every start."""
_READ_S = 3600.0
"""A read without a line is repeated after this long: the supervisor decides how long a rank may be silent."""
_EXIT_CODE_S = 5.0
"""Maximum wait for the exit code after the output has ended."""
_SIGNAL = 128
_NO_CODE = 255
_LOG_BYTES_PER_S = 1 << 20
"""A rank that prints more waits, once it has printed MAX_LOG_BYTES: its output must not occupy the host."""
_LINE_BYTES = 100


class Allowance:
    """An amount that grows with time, up to `burst`, and that is spent."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left = burst
        self._updated: float | None = None

    def spend(self, amount: float, now: float) -> float:
        """Spend `amount` at the monotonic time `now`. Return the seconds until it is available, or 0.0."""
        elapsed_s = now - self._updated if self._updated is not None else 0.0
        self._updated = now
        self._left = min(self._burst, self._left + elapsed_s * self._per_s) - amount
        return max(0.0, -self._left / self._per_s)


EVENTS_PER_S, MAX_EVENTS_AT_ONCE = 100, 10_000
"""A worker sends two in a second, and several at the end of an epoch; what waits in a connection while csdctl
is stopped arrives at once."""
WAITING_PER_S, MAX_WAITING_AT_ONCE = 1, 100
"""A worker says every five seconds that it waits; csdctl then tells the user, and asks the other ranks.
It warns more rarely."""


class EventValidator:
    """Checks the events of one process of rank `rank`. `nodes` are the machines of all ranks, in order."""

    def __init__(self, rank: int, nodes: Sequence[str], *, num_epochs: int, has_hub: bool = False) -> None:
        """`num_epochs`: of the run. `has_hub`: whether other ranks are behind this one."""
        self._rank, self._nodes = rank, nodes
        self._num_epochs, self._has_hub = num_epochs, has_hub
        self._allowance = Allowance(EVENTS_PER_S, MAX_EVENTS_AT_ONCE)
        self._waiting_allowance = Allowance(WAITING_PER_S, MAX_WAITING_AT_ONCE)
        self._pings: Counter[int] = Counter()
        self._is_ready = False
        self._has_finished = self._has_failed = False
        self._epochs_ended = 0

    def note_order(self, order: Order) -> None:
        """Take note of an order, before it is sent."""
        if isinstance(order, Ping):
            self._pings[order.number] += 1

    def forget_epochs(self) -> None:
        """Let epochs end once more: rank 0 continues from an earlier state."""
        self._epochs_ended = 0

    def check(self, event: events.Event, num_chars: int, now: float) -> None:
        """Raise ProtocolError unless the rank may send `event` now. It was a line of `num_chars`."""
        if self._allowance.spend(1 + num_chars / CHARS_PER_EVENT, now) > 0:
            most = f"at most {EVENTS_PER_S} events of {CHARS_PER_EVENT} characters per second"
            raise _violation(event, most)
        if isinstance(event, events.WaitingFor | events.Warned) and self._waiting_allowance.spend(1, now) > 0:
            raise _violation(event, f"at most {WAITING_PER_S} per second")
        events.check_event(event, self._nodes, self._rank)
        if isinstance(event, events.FROM_CSDCTL):
            raise _violation(event, "an event of a rank that trains")
        if isinstance(event, events.Traffic) and not self._has_hub:
            raise _violation(event, "only from a rank with others behind it")
        if not isinstance(event, events.Warned):  # it may come at any time
            self._check_order(event)

    def _check_order(self, event: events.Event) -> None:
        if isinstance(event, events.Pong):
            if not self._pings[event.number]:
                raise _violation(event, "one answer to each ping")
            self._pings[event.number] -= 1
        elif self._has_failed:
            raise _violation(event, "nothing after Failed")
        elif isinstance(event, events.Failed):
            self._has_failed = True
        elif self._has_finished:
            raise _violation(event, "nothing after Finished")
        elif isinstance(event, events.Ready) == self._is_ready:
            raise _violation(event, "Ready once, before anything else")
        elif isinstance(event, events.Ready):
            self._is_ready = True
        elif isinstance(event, events.Progress | events.EpochEnd):
            self._check_epoch(event)
        elif isinstance(event, events.Finished):
            self._has_finished = True

    def _check_epoch(self, event: events.Progress | events.EpochEnd) -> None:
        first, last = self._epochs_ended + 1, max(self._num_epochs, self._epochs_ended + 1)
        if not first <= event.epoch <= last:  # a rank that comes back skips some epochs
            raise _violation(event, f"an epoch from {first} to {last}", event.epoch)
        if isinstance(event, events.EpochEnd):
            self._epochs_ended = event.epoch


def _violation(event: events.Event, expected: str, received: object = None) -> ProtocolError:
    suffix = f", received {shorten(received)}" if received else ""
    return ProtocolError(f"{type(event).__name__}: expected {expected}{suffix}")


@dataclass(frozen=True)
class ProcessEnded:
    """A rank's process has ended. `error` holds the reason, `is_clean` whether it exited with 0."""

    rank: int
    node: str
    error: CsdctlError
    is_clean: bool = False


RankMessage = events.Event | ProcessEnded
OnMessage = Callable[[RankMessage], None]


class RankProcess:
    """One rank. `send` may be called until the process has ended, `close` always."""

    def __init__(
        self,
        rank: int,
        session: Session,
        conversation: Conversation,
        validator: EventValidator,
        log: CappedLog,
    ) -> None:
        """Call `listen` once. `validator` judges the events of the process, `log` gets its other output."""
        self.rank, self.node, self._meter = rank, session.name, session.meter
        self.validator, self._log = validator, log
        self._log_allowance = Allowance(_LOG_BYTES_PER_S, MAX_LOG_BYTES)
        self._is_closed = threading.Event()
        self._send_lock = threading.Lock()
        self._conversation = conversation

    def listen(self, on_message: OnMessage) -> None:
        """Call `on_message` in one thread with every event, in order, and with the end of the process."""
        self._on_message = on_message
        threading.Thread(target=self._read_lines, daemon=True).start()

    def send(self, order: Order) -> None:
        """Send an order. A process that has ended ignores it, as its end is reported anyway."""
        with self._send_lock, contextlib.suppress(EOFError, CsdctlError):
            self.validator.note_order(order)
            self._conversation.send_line(order_to_line(order))

    def close(self) -> None:
        """End the process and everything it started."""
        self._is_closed.set()
        with contextlib.suppress(CsdctlError):
            self._conversation.close()

    def _read_lines(self) -> None:
        ended: tuple[CsdctlError, bool] | None = None
        with contextlib.closing(self._log):
            while not ended:
                try:
                    self._handle_line(self._conversation.read_line(deadline_s=_READ_S))
                except DeadlineError:
                    continue
                except EOFError:
                    ended = self._read_exit()
                except CsdctlError as failure:
                    ended = failure, False
                except ProtocolError as violation:
                    text = f"sent an invalid event: {violation}"
                    ended = NodeError(text, node=self.node, remedy=CHECK_WORKER), False
                except (OSError, ValueError) as failure:  # closed by `close`, most likely
                    ended = NodeError(f"its output cannot be read: {failure}", node=self.node), False
        if not self._is_closed.is_set():
            self._on_message(ProcessEnded(self.rank, self.node, *ended))

    def _handle_line(self, line: str) -> None:
        event = events.event_from_line(line)
        if event is None:
            self._handle_output(line)
            return
        if isinstance(event, events.Failed) and event.node == events.UNKNOWN_NODE:
            event = replace(event, node=self.node)
        self.validator.check(event, len(line), time.monotonic())
        self._on_message(event)

    def _handle_output(self, line: str) -> None:
        self._meter.record(TrafficClass.LOG, received=len(line) + 1)
        if line.strip() and not any(noise in line for noise in _NOISE):
            self._log.write(line.encode(errors="replace"))
        delay_s = self._log_allowance.spend(_LINE_BYTES + len(line), time.monotonic())
        if delay_s:  # the rank's pipe and connection fill, and it waits
            self._is_closed.wait(delay_s)

    def _read_exit(self) -> tuple[CsdctlError, bool]:
        try:
            done = self._conversation.wait(deadline_s=_EXIT_CODE_S)
        except CsdctlError as error:
            return error, False
        return explain_exit(self.rank, self.node, done), done.exit_code == 0


def explain_exit(rank: int, node: str, done: Completed) -> CsdctlError:
    """Return why a rank's process ended, from its exit code."""
    signal = done.exit_code - _SIGNAL if done.exit_code < _NO_CODE else 0
    if signal == 9:
        return OutOfMemoryError(
            f"rank {rank} was killed by signal 9; a guess: out of memory", node=node, remedy=MEMORY_REMEDY
        )
    if signal > 0:
        return NodeError(f"rank {rank} was killed by signal {signal}", node=node)
    if done.exit_code == _NO_CODE:
        return NodeError(f"rank {rank} or its SSH session was killed", node=node)
    return NodeError(
        f"rank {rank} exited with code {done.exit_code}", node=node, remedy=f"see the log of rank {rank}"
    )


StartRank = Callable[[int], RankProcess]


@dataclass(frozen=True)
class Restarted:
    """A rank that was dropped has a process again, which is not ready yet."""

    rank: int


class RankProcesses:
    """The processes of all ranks of one run. `close` ends them, whatever happened."""

    def __init__(
        self,
        start: StartRank,
        restart: StartRank,
        restart_interval_s: float,
        on_arrival: Callable[[RankMessage | Restarted], None],
    ) -> None:
        """`on_arrival` is called once with every new message."""
        self._start = start
        self._restart = restart
        self._restart_interval_s = restart_interval_s
        self._on_arrival = on_arrival
        self._messages: queue.Queue[tuple[RankProcess, RankMessage | None]] = queue.Queue()
        """Messages, as often as `EventValidator` allows; None: the process itself, after a restart."""
        self._running: dict[int, RankProcess] = {}
        self._unhandled: RankMessage | None = None
        self._again: RankMessage | None = None
        """A message whose handling was interrupted."""
        self._restarting: set[int] = set()
        """Ranks whose next process has not arrived yet."""
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @property
    def ranks(self) -> set[int]:
        """The ranks that have a process."""
        return set(self._running)

    def start(self, rank: int) -> None:
        """Start a rank. Raise CsdctlError if that fails."""
        self._running[rank] = self._start(rank)
        self._listen(self._running[rank])

    def _listen(self, process: RankProcess) -> None:
        process.listen(lambda message: self._messages.put((process, message)))

    def receive(self, timeout_s: float) -> RankMessage | Restarted | None:
        """Return what arrives next. None if nothing arrives in time, or if its process was dropped."""
        try:
            process, message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            self._restarting.discard(process.rank)
            self._running[process.rank] = process
            return Restarted(process.rank)
        return message if self._running.get(process.rank) is process else None

    def next(self, timeout_s: float) -> RankMessage | None:
        """Return the next message to handle, None when none arrives in time."""
        if self._again is not None:
            self._unhandled, self._again = self._again, None
            return self._unhandled
        message = self.receive(timeout_s)
        self._unhandled = message if not isinstance(message, Restarted) else None
        if message is not None:
            self._on_arrival(message)
        return self._unhandled

    def mark_handled(self) -> None:
        """Record that the latest message from `next` needs no more handling."""
        self._unhandled = None

    def requeue_unhandled(self) -> None:
        """Return the latest message from `next` again, unless handled: an interrupt comes at any time."""
        self._again = self._unhandled

    def send(self, rank: int, order: Order) -> None:
        """Send an order to a rank. Do nothing if the rank has no process."""
        if process := self._running.get(rank):
            process.send(order)

    def forget_epochs(self) -> None:
        """Let epochs end once more on all ranks."""
        for process in self._running.values():
            process.validator.forget_epochs()

    def drop(self, rank: int) -> None:
        """Close the rank's process and ignore all its messages from now on."""
        if self._again is not None and self._again.rank == rank:
            self._again = None
        if process := self._running.pop(rank, None):
            process.close()

    def restart(self, rank: int, pause_s: float = 0.0) -> None:
        """Try to restart a dropped rank after a pause until it succeeds or the run ends. Return at once."""
        if rank in self._restarting:
            return
        self._restarting.add(rank)
        threading.Thread(target=self._keep_restarting, args=(rank, pause_s), daemon=True).start()

    def _keep_restarting(self, rank: int, pause_s: float) -> None:
        self._is_over.wait(pause_s)
        while not self._is_over.is_set():
            try:
                process = self._restart(rank)
            except Exception:  # whatever the cause, the next attempt may succeed
                self._is_over.wait(self._restart_interval_s)
                continue
            with self._lock:
                if not self._is_over.is_set():
                    self._messages.put((process, None))
                else:
                    process.close()
            self._listen(process)
            return

    def close(self) -> None:
        """End all processes, including restarted ones that `receive` has not returned yet."""
        with self._lock:
            self._is_over.set()
        while not self._messages.empty():
            self.receive(0.0)
        for process in self._running.values():
            process.close()
