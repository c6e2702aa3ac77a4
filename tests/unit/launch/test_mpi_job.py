"""A link in which a small program stands in for mpirun and prints what mpirun prints. Causes and traffic."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.mpi_job import (
    ENDED,
    MAX_TAIL_LINE_CHARS,
    REQUEST,
    TRAFFIC_CLASSES,
    JobOutcome,
    MpiJob,
    add_mpirun_traffic,
    add_rank_traffic,
    explain_link,
)
from csdctl.runs.directory import CappedLog
from csdctl.transport.local import LocalSession
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Conversation
from csdctl.worker.protocol.events import ACTIVATIONS, SAMPLES, STATE, SUMS, SentBytes, Traffic
from csdctl.worker.protocol.sandbox import CONNECTED
from tests.patience import eventually
from tests.unit.transport.test_session_contract import is_alive


class Job:
    """One MpiJob in its directory, and the daemons that it asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[tuple[str, str]] = []
        self.request = REQUEST

    def make(self, program: str) -> MpiJob:
        (self.directory / "mpirun.py").write_text(f"import os, signal, sys, time\n{program}")
        command = [sys.executable, "-u", str(self.directory / "mpirun.py")]
        session = LocalSession("host", self.directory)
        start = lambda: session.converse(command)  # noqa: E731
        log = CappedLog(self.directory / "rank-1.log", "csd0")
        return MpiJob(start, log, self.start_daemon, request=self.request)

    def start_daemon(self, host: str, command: str) -> Conversation:
        self.asked.append((host, command))
        raise CsdctlError("does not answer")

    def run(self, program: str) -> JobOutcome:
        return self.make(program).run()

    def print(self, text: str) -> JobOutcome:
        """Run an mpirun that prints `text` and ends."""
        return self.run(f"sys.stdout.write({text!r})")

    @property
    def log(self) -> str:
        return (self.directory / "rank-1.log").read_text()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# This process, and a child in its own group that ignores interrupts, as those of a shell; both must be ended.
HANGING = """
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(100_000)
    os._exit(0)
open("pids", "w").write(f"{os.getpid()} {child}")
"""


class TestOutput:
    def test_output_is_logged_without_what_mpi_prints_after_every_loss(self, job: Job) -> None:
        abort = "[vm:0] *** An error occurred in Socket closed\n[vm:0] *** MPI_ERRORS_ARE_FATAL (processes"
        outcome = job.print(f"one\n\ntwo\r\n{abort}\n{'-' * 70}\nthree")
        assert outcome.lines == ["one", "two", "three"]
        assert job.log == "link: one\nlink: two\nlink: three\n"

    @pytest.mark.parametrize(
        ("text", "is_connected"), [(f"x\n{CONNECTED}\n", True), (f"x {CONNECTED}\n", False), ("", False)]
    )
    def test_link_is_connected_when_its_ends_say_so(self, job: Job, text: str, *, is_connected: bool) -> None:
        assert job.print(text).is_connected is is_connected

    def test_long_line_is_cut_and_control_codes_are_logged_as_escapes(self, job: Job) -> None:
        escapes = r"b'\n\xff\x1b]52;c;QQ==\x07\x9b2J\n'"
        outcome = job.run(f"sys.stdout.buffer.write(b'x' * 100_000 + {escapes})")
        assert max(map(len, outcome.lines)) == MAX_TAIL_LINE_CHARS
        assert "\x1b" not in job.log
        assert "\\x1b]52;c;QQ==\\x07" in job.log


class TestEnding:
    def test_link_that_is_ended_leaves_nothing_running(self, job: Job) -> None:
        running = job.make(f"{HANGING}\ntime.sleep(100_000)")
        thread = threading.Thread(target=running.run)
        thread.start()
        path = job.directory / "pids"
        assert eventually(lambda: path.exists() and len(path.read_text().split()) == 2)
        running.end()
        thread.join()
        pids = [int(word) for word in path.read_text().split()]
        assert eventually(lambda: not any(map(is_alive, pids)))  # killed orphans take a moment to be reaped

    def test_orphan_that_keeps_the_pipes_open_does_not_block_the_end(self, job: Job) -> None:
        program = "pid = os.fork()\nif pid == 0:\n    os.setsid()\n    time.sleep(100_000)\n"
        program += "open('pid', 'w').write(str(pid))\n"
        job.run(program)
        os.kill(int((job.directory / "pid").read_text()), signal.SIGKILL)


def test_connection_that_failed_is_the_cause_of_a_link_that_does_not_connect() -> None:
    lines = ["no connection to 10.92.1.5 port 40123: Connection timed out", "Daemon exit status: 1"]
    error = explain_link(JobOutcome(lines), "csd0", "")
    assert error.message == f"its link did not connect: {lines[0]}"
    assert "firewalls" in error.remedy
    assert "exited with 1" in explain_link(JobOutcome(lines, is_connected=True), "csd0", "").message
    lines = [
        "Traceback (most recent call last):",
        '  File "x"',
        "PermissionError: denied",
        "prterun detected",
        "Exit code: 1",
    ]
    assert explain_link(JobOutcome(lines), "csd0", "").message.endswith(": PermissionError: denied")


class TestDaemon:
    def test_daemon_that_cannot_be_started_ends_the_link_and_is_the_cause(self, job: Job) -> None:
        outcome = job.run("print('@csdctl-daemon node1 prted --x 1')\ntime.sleep(100_000)")
        assert job.asked == [("node1", "prted --x 1")]
        assert outcome.lines[0] == "does not answer"
        assert "did not connect to mpirun and exited with 1" in explain_link(outcome, "csd0", "").message

    def test_what_is_printed_on_the_node_asks_for_no_daemon(self, job: Job) -> None:
        """mpirun prints it as its own, and only the agent on its machine knows the secret."""
        job.request = f"{REQUEST}0123abcd "
        job.print(f"{REQUEST}node1 prted\n x {job.request}node1 prted\n")
        assert job.asked == []
        job.print(f"{job.request}node1 prted\n{job.request}node2 prted\n")
        assert job.asked == [("node1", "prted")], "there is one"

    def test_last_line_of_a_daemon_that_failed_is_part_of_the_cause(self, job: Job) -> None:
        lines = ["Traceback (most recent call last):", "OSError: [Errno 27] File too large", "", "-----"]
        session = LocalSession("csd1", job.directory)
        program = f"print(*{lines!r}, sep=chr(10)); raise SystemExit(7)"
        job.start_daemon = lambda host, command: session.converse([sys.executable, "-c", program])  # type: ignore[method-assign]
        outcome = job.run("print('@csdctl-daemon node1 prted')\ntime.sleep(100_000)")
        error = explain_link(outcome, "csd1", "")
        assert error.node == "csd1"
        assert "exited with 7: OSError: [Errno 27] File too large" in error.message


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([f"{ENDED}csd0 143", f"{ENDED}host 137"], "its process on host was killed by signal 9"),
        ([f"{ENDED}host 1", f"{ENDED}csd0 3"], "its process on csd0 exited with 3"),
        (["x", "  Remote host:   node1", "  Daemon exit status: 213"], "exited with 213"),
        (["  Remote daemon: [prterun-host-1@0,1] on node n"], "its MPI daemon no longer answers"),
        (["there are no slots", f"{ENDED}csd0 1"], ": there are no slots"),
        ([f"{ENDED}host 1", f"{ENDED}csd0 143"], "mpirun printed nothing"),
        ([], "mpirun printed nothing"),
    ],
)
@pytest.mark.parametrize("is_connected", [True, False])
def test_cause_of_a_lost_link_is_of_its_node(lines: list[str], cause: str, *, is_connected: bool) -> None:
    """Whatever is said, and whoever is named: it concerns this link."""
    error = explain_link(JobOutcome(lines, is_connected), "csd0", "logs: /x")
    assert error.node == "csd0"
    assert error.message.startswith("its link was lost" if is_connected else "its link did not connect")
    assert cause in error.message
    assert error.remedy.endswith("logs: /x")


def test_traffic_of_ranks_is_that_of_their_machines_by_class() -> None:
    """Activations of private samples must never be shown as anything else."""
    rows = [(SUMS, 1, 0, 25), (SUMS, 0, 1, 7), (STATE, 0, 2, 3), (SAMPLES, 0, 2, 4), (ACTIVATIONS, 2, 0, 9)]
    traffic = Traffic(0, "host", tuple(SentBytes(*row) for row in rows))
    assert add_rank_traffic(traffic, ["host", "csd0", "csd1"], TRAFFIC_CLASSES) == {
        ("csd0", "host", TrafficClass.GRADIENT): 25,
        ("host", "csd0", TrafficClass.GRADIENT): 7,
        ("host", "csd1", TrafficClass.MODEL): 3,
        ("host", "csd1", TrafficClass.PUBLIC): 4,
        ("csd1", "host", TrafficClass.ACTIVATIONS): 9,
    }


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("10.0.0.2 51234", "csd0"),
        ("10.0.0.9 2201", "csd1"),
        ("10.0.0.9 2202", "csd2"),
        ("10.0.0.9 51234", ""),
        ("10.0.0.77 22", ""),
    ],
)
def test_connection_of_mpirun_is_that_of_the_node_at_its_address(peer: str, name: str) -> None:
    """Nodes with one address, as in an emulated fleet, differ in their ports alone."""
    same = (Node("csd1", "10.0.0.9", port=2201), Node("csd2", "10.0.0.9", port=2202))
    fleet = Fleet((Node("csd0", "10.0.0.2"), *same))
    outcome = JobOutcome(connection_bytes={(f"10.0.0.1 {port}", peer): (5, 70) for port in (40000, 40001)})
    control = TrafficClass.CONTROL
    expected = {("host", name, control): 10, (name, "host", control): 140} if name else {}
    assert add_mpirun_traffic(outcome, fleet) == expected
