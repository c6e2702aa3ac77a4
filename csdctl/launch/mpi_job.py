"""The running job: starts mpirun, reads what the ranks print, watches, ends.

Success is judged by completion records, never by mpirun's exit code: it exits 0 when a node is lost.
"""

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from csdctl.errors import InputError
from csdctl.launch.diagnosis import is_noise
from csdctl.launch.mpi_command import ALLOW_ROOT
from csdctl.worker.protocol.events import Event, Exited, Failed, Finished, Ready, event_from_line
from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.tcp_counters import list_connections

_TAGGED = re.compile(rb"\[\d+,(\d+)\]<(stdout|stderr)>: ?(.*)", re.DOTALL)
END_GRACE_S = 5.0
DRAIN_S = 2.0
"""When all is ended, what is still on its way is waited for so long: an orphan may hold a stream open."""
DAEMONS = ("mpirun", "prterun", "ssh")
"""The programs that bring ranks to the nodes; the others are ranks, and count for themselves."""
LOOK_SHARE, LONGEST_LOOK_S = 0.1, 2.0
"""Connections are looked at after another tenth of the time that has passed, and this often."""
ORPHAN_GRACE_S = 1.0
_DIES_WITH_US = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""mpirun is told to end when csdctl dies, however that happens; 1 is PR_SET_PDEATHSIG."""
MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Deadlines:
    """How long the job may be silent, in seconds: until all ranks are ready, and from then on."""

    start_s: float = 300.0
    silence_s: float = 300.0

    def __post_init__(self) -> None:
        for name, value in (("start", self.start_s), ("silence", self.silence_s)):
            if not value >= 1:
                raise InputError(f"the {name} deadline must be 1 second at least, received {value:g}")


@dataclass
class JobOutcome:
    """How the job ended."""

    exit_code: int | None = None
    finished: dict[int, Finished] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    exited: dict[int, Exited] = field(default_factory=dict)
    """Ranks that ended badly, the first one first."""
    ready: set[int] = field(default_factory=set)
    overdue: str = ""
    """Which deadline ended it: '', 'start' or 'silence'."""
    carried: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Bytes sent and received by the TCP connections of mpirun and its ssh, by both ends."""
    last_words: list[str] = field(default_factory=list)
    """The last lines that mpirun and its ssh said themselves."""


class MpiJob:
    """One mpirun, from start to end. The caller calls `run` once; `end` may come from anywhere."""

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        logs: Callable[[int | None], Path],
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        """`logs(rank)` names a rank's log file, `logs(None)` mpirun's; all are in `directory`'s run."""
        self._command = list(command)
        self._num_ranks = num_ranks
        self._logs = logs
        self._directory = directory
        self._environment = {**environment, **ALLOW_ROOT}
        self._events: queue.Queue[Event | None] = queue.Queue()
        """None is the end of a stream."""
        self._words: deque[str] = deque(maxlen=60)
        self._files: dict[int | None, IO[bytes]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_ended = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, on_event: Callable[[Event], None], deadlines: Deadlines) -> JobOutcome:
        """Start mpirun, pass on every event, and return when all is over; nothing runs afterwards here."""
        outcome = JobOutcome()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _DIES_WITH_US, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._directory,
            env=self._environment,
            start_new_session=True,
        )
        readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self._process.stdout, self._process.stderr)
        ]
        for reader in readers:
            reader.start()
        try:
            if not self._is_ended:  # who ended it just before it was started found nothing to end
                self._watch(self._process, outcome, on_event, deadlines)
        finally:
            self.end()
            drained_by = time.monotonic() + DRAIN_S
            for reader in readers:
                reader.join(timeout=max(0.0, drained_by - time.monotonic()))
            self._close_logs()
        outcome.exit_code = self._process.returncode
        outcome.last_words = list(self._words)
        return outcome

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        outcome: JobOutcome,
        on_event: Callable[[Event], None],
        deadlines: Deadlines,
    ) -> None:
        started = heard = looked = time.monotonic()
        ended: float | None = None
        num_streams = 2
        while num_streams:
            event = None
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=0.2)
                num_streams -= event is None
            if event is not None:
                heard = time.monotonic()
                self._note(outcome, event)
                on_event(event)
            now = time.monotonic()
            if now - looked > min(LONGEST_LOOK_S, LOOK_SHARE * (now - started)):
                looked = now
                self._look_at_traffic(outcome)
            if process.poll() is not None:
                ended = ended or now
                if now - ended > ORPHAN_GRACE_S:
                    return  # mpirun was killed, and what it had started keeps its output open
            if len(outcome.finished) == self._num_ranks and now - heard > END_GRACE_S:
                return  # something a rank left behind keeps mpirun's output open
            if len(outcome.ready) < self._num_ranks:
                if now - started > deadlines.start_s:
                    outcome.overdue = "start"
                    return
            elif now - heard > deadlines.silence_s:
                outcome.overdue = "silence"
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)  # its output ends just before it does

    @staticmethod
    def _note(outcome: JobOutcome, event: Event) -> None:
        if isinstance(event, Ready):
            outcome.ready.add(event.rank)
        elif isinstance(event, Finished):
            outcome.finished[event.rank] = event
        elif isinstance(event, Failed):
            outcome.failed.setdefault(event.rank, event)
        elif isinstance(event, Exited):
            outcome.exited.setdefault(event.rank, event)

    def _read(self, stream: IO[bytes] | None) -> None:
        """Take in one stream to its end, whatever happens to the logs: a full pipe would stop the run."""
        assert stream is not None
        # Closed here alone: closing waits for a reader, and an orphan of mpirun may hold the pipe open.
        try:
            with stream:
                self._read_lines(stream)
        finally:
            self._events.put(None)

    def _read_lines(self, stream: IO[bytes]) -> None:
        while line := stream.readline(MAX_LINE_BYTES):
            tagged = _TAGGED.match(line)
            rank = int(tagged[1]) if tagged else None
            text = tagged[3] if tagged else line
            if tagged and tagged[2] == b"stdout":
                try:
                    event = event_from_line(text.decode(errors="replace").rstrip("\r\n"))
                except ProtocolError:
                    event = None
                if event is not None:
                    self._events.put(event)
                    continue
            if text.strip() and not is_noise(text.decode(errors="replace")):
                with contextlib.suppress(OSError):  # no room for a log is no reason to end a run
                    self._log(rank, text)

    def _close_logs(self) -> None:
        """What an orphan of mpirun still says afterwards is dropped."""
        with self._lock:
            self._is_closed = True
            for file in self._files.values():
                file.close()

    def _log(self, rank: int | None, text: bytes) -> None:
        text = text.replace(b"\0", b"")
        with self._lock:
            if self._is_closed:
                return
            if rank is None:
                self._words.append(text.decode(errors="replace").strip())
            if rank not in self._files:
                self._files[rank] = self._logs(rank).open("ab")
            self._files[rank].write(text)
            self._files[rank].flush()

    def _look_at_traffic(self, outcome: JobOutcome) -> None:
        """What mpirun and its ssh have carried: when they have ended, nobody can tell."""
        for pid in _session_pids(self._process.pid) if self._process else ():
            for one in list_connections(pid) if _program(pid) in DAEMONS else ():
                outcome.carried[one.local, one.peer] = one.num_sent, one.num_received

    def end(self) -> None:
        """End mpirun and what it started, gently, then by force. One interrupt only makes it ask again."""
        self._is_ended = True
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
            try:
                process.wait(timeout=END_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # ssh clients and local ranks share mpirun's session, in groups of their own.
        _end_session(process.pid)
        # Its own directory, which it leaves behind when it is killed.
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{process.pid}", ignore_errors=True)


def _end_session(session: int) -> None:
    """Kill every process of a session."""
    for pid in _session_pids(session):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _session_pids(session: int) -> list[int]:
    """The processes of a session, by field 6 of /proc/PID/stat."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[3]) == session:
                found.append(int(stat.parent.name))
    return found


def _program(pid: int) -> str:
    """The name of what process `pid` runs; '' when it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
