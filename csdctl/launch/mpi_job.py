"""A running mpirun: start it, read what the ranks print, watch its deadlines, end it.

Completion records decide whether a job succeeded. mpirun's exit code does not: it exits with 0 when a node
is lost.
"""

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from csdctl.errors import InputError
from csdctl.launch.mpi_output import LogPath, MpiOutput
from csdctl.launch.process_session import kill_session, list_session_pids, read_program_name
from csdctl.worker.protocol.events import Event, Exited, Failed, Finished, Ready
from csdctl.worker.protocol.tcp_counters import list_connections

POLL_INTERVAL_S = 0.2
DAEMONS = ("mpirun", "prterun")
"""The programs that connect to the daemons on nodes. Ranks report their own traffic."""
MAX_SAMPLE_INTERVAL_S, SAMPLE_INTERVAL_SHARE = 2.0, 0.1
"""Connections are sampled each time another tenth of the elapsed time has passed, at least this often."""


@dataclass(frozen=True)
class Deadlines:
    """The longest silence allowed, in seconds: until all ranks are ready, and after that."""

    start_s: float = 300.0
    silence_s: float = 300.0

    def __post_init__(self) -> None:
        for name, value in (("start", self.start_s), ("silence", self.silence_s)):
            if not value >= 1:
                raise InputError(f"the {name} deadline must be at least 1 second, received {value:g}")


@dataclass(frozen=True)
class EndTimeouts:
    """How long to wait while a job ends, in seconds."""

    grace_s: float = 5.0
    """After the last completion record, for mpirun to end by itself."""
    sandbox_s: float = 2.0
    """For the sandbox to kill its processes and remove its files."""
    drain_s: float = 2.0
    """For output still in the pipes after all processes have ended; an orphan may keep a stream open."""
    orphan_grace_s: float = 1.0
    """After mpirun was killed, while a process that it started keeps its output open."""


class Closable(Protocol):
    """What ends with mpirun."""

    def close(self) -> None:
        """End it."""


@dataclass
class JobOutcome:
    """How a job ended."""

    exit_code: int | None = None
    finished: dict[int, Finished] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    exited: dict[int, Exited] = field(default_factory=dict)
    """Ranks with a non-zero exit code, in order of arrival."""
    ready: set[int] = field(default_factory=set)
    overdue: str = ""
    """The deadline that ended the job: '', 'start' or 'silence'."""
    connection_bytes: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Bytes sent and received on each TCP connection of mpirun, by local and peer address."""
    stderr_tail: list[str] = field(default_factory=list)
    """The last lines that mpirun and its daemons printed, on either stream."""

    def add(self, event: Event) -> None:
        """Record the state of the rank that sent `event`; the first failure and exit of a rank are kept."""
        if isinstance(event, Ready):
            self.ready.add(event.rank)
        elif isinstance(event, Finished):
            self.finished[event.rank] = event
        elif isinstance(event, Failed):
            self.failed.setdefault(event.rank, event)
        elif isinstance(event, Exited):
            self.exited.setdefault(event.rank, event)


class MpiJob:
    """One mpirun, from start to end. Call `run` once; `end` may be called from any thread."""

    def __init__(
        self,
        command: Sequence[str],
        nodes: Sequence[str],
        log_path: LogPath,
        directory: Path,
        environment: Mapping[str, str],
        timeouts: EndTimeouts = EndTimeouts(),
        *,
        first_line: str = "",
        daemons: Callable[[], Closable] = contextlib.ExitStack,
    ) -> None:
        """Prepare to run `command` in `directory`; `nodes` are the machines of its ranks, in order.

        It gets `first_line` on its standard input, which stays open until it is to end: it also ends with
        csdctl. `daemons` starts what serves mpirun while it runs.
        """
        self._command = list(command)
        self._num_ranks = len(nodes)
        self._directory = directory
        self._environment = environment
        self._timeouts = timeouts
        self._first_line = first_line
        self._daemons = daemons
        self._output = MpiOutput(log_path, nodes)
        self._is_ended = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, on_event: Callable[[Event], None], deadlines: Deadlines) -> JobOutcome:
        """Start mpirun, pass on every event, and return when all its local processes have ended."""
        outcome = JobOutcome()
        with contextlib.closing(self._daemons()):
            self._run(outcome, on_event, deadlines)
        return outcome

    def _run(self, outcome: JobOutcome, on_event: Callable[[Event], None], deadlines: Deadlines) -> None:
        self._process = process = self._start()
        readers = [
            threading.Thread(target=self._output.read, args=(stream,), daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for reader in readers:
            reader.start()
        try:
            if not self._is_ended:  # `end` may have been called before the process was started
                self._watch(process, outcome, on_event, deadlines)
        finally:
            self.end()
            drained_by = time.monotonic() + self._timeouts.drain_s
            for reader in readers:
                reader.join(timeout=max(0.0, drained_by - time.monotonic()))
            self._output.close()
        outcome.exit_code = process.returncode
        outcome.stderr_tail = self._output.tail

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._directory,
            env=self._environment,
            start_new_session=True,
        )
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._first_line.encode() + b"\n")
            process.stdin.flush()
        return process

    def _watch(
        self,
        process: "subprocess.Popen[bytes]",
        outcome: JobOutcome,
        on_event: Callable[[Event], None],
        deadlines: Deadlines,
    ) -> None:
        """Pass on events until both streams have ended, a deadline passes, or only an orphan is left."""
        started = last_event = last_sample = time.monotonic()
        exited: float | None = None
        num_streams = 2
        while num_streams:
            with contextlib.suppress(queue.Empty):
                event = self._output.next_event(POLL_INTERVAL_S)
                if event is None:
                    num_streams -= 1
                else:
                    last_event = time.monotonic()
                    outcome.add(event)
                    on_event(event)
            now = time.monotonic()
            if now - last_sample > min(MAX_SAMPLE_INTERVAL_S, SAMPLE_INTERVAL_SHARE * (now - started)):
                last_sample = now
                _sample_connections(process.pid, outcome)
            if process.poll() is not None:
                exited = exited or now
                if now - exited > self._timeouts.orphan_grace_s:
                    return  # mpirun was killed, and a process it started keeps its output open
            if len(outcome.finished) == self._num_ranks and now - last_event > self._timeouts.grace_s:
                return  # a process that a rank left behind keeps mpirun's output open
            outcome.overdue = self._find_overdue(outcome, deadlines, now - started, now - last_event)
            if outcome.overdue:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_INTERVAL_S)  # its output ends just before the process does

    def _find_overdue(
        self, outcome: JobOutcome, deadlines: Deadlines, elapsed_s: float, silent_s: float
    ) -> str:
        """Return the deadline that has passed: 'start', 'silence', or '' for none."""
        if len(outcome.ready) < self._num_ranks:
            return "start" if elapsed_s > deadlines.start_s else ""
        return "silence" if silent_s > deadlines.silence_s else ""

    def end(self) -> None:
        """End mpirun's sandbox, and with it all that mpirun has started; kill it when it does not end.

        mpirun itself would wait for daemons that no longer answer. Theirs end with `daemons`.
        """
        self._is_ended = True
        process = self._process
        if process is None:
            return
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=self._timeouts.sandbox_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Agents and local ranks share mpirun's session, in process groups of their own.
        kill_session(process.pid)


def _sample_connections(session_id: int, outcome: JobOutcome) -> None:
    """Record the bytes on the connections of mpirun; the kernel drops them when it ends."""
    for pid in list_session_pids(session_id):
        for tcp in list_connections(pid) if read_program_name(pid) in DAEMONS else ():
            outcome.connection_bytes[tcp.local, tcp.peer] = tcp.num_sent, tcp.num_received
