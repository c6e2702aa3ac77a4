"""A job in which a small program stands in for mpirun and prints what mpirun prints; causes; traffic."""

import _thread
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.mpi_job import (
    MAX_LINE_BYTES,
    REQUEST,
    JobOutcome,
    MpiJob,
    add_mpirun_traffic,
    add_rank_traffic,
    find_cause,
)
from csdctl.transport.local import LocalSession
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Conversation
from csdctl.worker.protocol.events import (
    ACTIVATIONS,
    SAMPLES,
    STATE,
    SUMS,
    CollectiveTimed,
    Event,
    Exited,
    Failed,
    Finished,
    Ready,
    SentBytes,
    Traffic,
    event_to_line,
)
from tests.patience import eventually, scaled
from tests.unit.transport.test_session_contract import is_alive

READY = [Ready(rank, f"csd{rank}", 10) for rank in range(2)]
FINISHED = [Finished(rank, f"csd{rank}", 1, 4, "hash", 1 << 20) for rank in range(2)]
TIMED = CollectiveTimed(0, "csd0", 2, 1 << 20, "star", 0.5)


def tag(rank: int, text: str, stream: str = "stdout") -> str:
    return f"[1,{rank}]<{stream}>: {text}\n"


def event_lines(*events: Event) -> str:
    return "".join(tag(event.rank, event_to_line(event)) for event in events)


class Job:
    """One MpiJob in its directory, and the events it passed on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[Event] = []
        self.asked: list[tuple[str, str]] = []
        self.request = REQUEST

    def make(self, program: str, **options: float) -> MpiJob:
        (self.directory / "mpirun.py").write_text(f"import os, signal, sys, time\n{program}")
        command = [sys.executable, "-u", str(self.directory / "mpirun.py")]
        session = LocalSession("host", self.directory)
        nodes = "csd0", "csd1"
        start = lambda: session.converse(command)  # noqa: E731
        return MpiJob(start, nodes, self.log, self.start_daemon, request=self.request, **options)

    def start_daemon(self, host: str, command: str) -> Conversation:
        self.asked.append((host, command))
        raise CsdctlError("does not answer")

    def run(self, program: str, deadline_s: float = 3600, **options: float) -> JobOutcome:
        outcome = self.make(program, **options).run(deadline_s)
        self.events = outcome.events
        return outcome

    def print(self, text: str, *, errors: str = "", exit_code: int = 0) -> JobOutcome:
        """Run an mpirun that prints `text` and ends."""
        return self.run(f"sys.stderr.write({errors!r})\nsys.stdout.write({text!r})\nsys.exit({exit_code})")

    def log(self, rank: int | None) -> Path:
        return self.directory / ("mpirun.log" if rank is None else f"rank-{rank}.log")

    def text(self, rank: int | None) -> str:
        return self.log(rank).read_text() if self.log(rank).exists() else ""


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


def all_have_ended(directory: Path) -> bool:
    pids = [int(word) for word in (directory / "pids").read_text().split()]
    assert len(pids) == 2
    return eventually(lambda: not any(map(is_alive, pids)))  # killed orphans take a moment to be reaped


class TestOutput:
    def test_events_are_separated_from_other_lines(self, job: Job) -> None:
        first, second = map(event_lines, READY)
        job.print(tag(0, "before") + first + tag(1, "between") + second + tag(0, "after"))
        assert job.events == READY
        assert (job.text(0), job.text(1)) == ("before\nafter\n", "between\n")

    def test_events_are_read_from_standard_output_only(self, job: Job) -> None:
        job.print(tag(0, event_to_line(FINISHED[0]), "stderr") + event_to_line(FINISHED[1]) + "\n")
        assert job.events == []

    @pytest.mark.parametrize("line", ['@csdctl {"event":"Fini', "@csdctl [1]", '@csdctl {"event":["x"]}'])
    def test_damaged_event_is_a_failure_of_its_rank_and_later_events_are_read(
        self, job: Job, line: str
    ) -> None:
        outcome = job.print(tag(1, line) + event_lines(*READY))
        assert job.text(1) == f"{line}\n"
        assert job.events[1:] == READY
        assert outcome.of_type(Failed)[1].message.startswith("sent an invalid event: expected")

    @pytest.mark.parametrize("event", [Exited(0, "csd0", 137), Exited(1, "csd0", 137), Exited(7, "csd7", 1)])
    def test_rank_reports_of_itself_alone(self, job: Job, event: Event) -> None:
        outcome = job.print(tag(1, event_to_line(event)))
        assert [type(event) for event in outcome.events] == [Failed]
        assert outcome.events[0].rank == 1

    def test_node_reports_everything_once(self, job: Job) -> None:
        job.print(event_lines(*[READY[1]] * 5, *[TIMED] * 2))
        assert job.events == [READY[1], TIMED, TIMED]

    def test_what_mpi_prints_after_every_loss_is_left_out(self, job: Job) -> None:
        abort = "[vm:0] *** An error occurred in Socket closed", "[vm:0] *** MPI_ERRORS_ARE_FATAL (processes"
        job.print("".join(tag(1, line) for line in abort) + "-" * 70 + "\n" + SIGNALLED[0] + "\n")
        assert (job.text(1), job.text(None)) == (f"{abort[0]}\n", f"{SIGNALLED[0]}\n")

    def test_output_of_an_unknown_rank_is_mpiruns_own(self, job: Job) -> None:
        job.print(tag(2, "two") + tag(10**8, "many"))
        assert [path.name for path in job.directory.glob("*.log")] == ["mpirun.log"]

    def test_rest_of_a_long_line_belongs_to_the_same_rank(self, job: Job) -> None:
        blame = "process rank 0 exited on signal 9"
        job.run(f"sys.stdout.write({tag(1, '')!r}.rstrip('\\n') + 'x' * {MAX_LINE_BYTES} + {blame!r})")
        assert blame in job.text(1)
        assert job.text(None) == ""

    def test_control_codes_and_invalid_utf8_are_logged_as_escapes(self, job: Job) -> None:
        line = b"[1,0]<stdout>: \xff\x1b]52;c;QQ==\x07\x9b2J\n\x1b[2J of ssh\n"
        job.run(f"sys.stdout.buffer.write({line!r} + {event_lines(*READY).encode()!r})")
        assert job.events == READY
        assert job.log(0).read_text() == "\\xff\\x1b]52;c;QQ==\\x07\\x9b2J\n"
        assert job.log(None).read_text() == "\\x1b[2J of ssh\n"


class TestEnding:
    def test_silent_start_is_ended_and_nothing_is_left(self, job: Job) -> None:
        program = f"{HANGING}\nsys.stdout.write({event_lines(READY[0])!r})\ntime.sleep(100_000)"
        outcome = job.run(program, scaled(4))
        assert outcome.is_overdue
        assert outcome.events == [READY[0]]
        assert outcome.exit_code is None
        assert all_have_ended(job.directory)

    def test_interrupt_by_the_user_ends_the_job_and_is_raised(self, job: Job) -> None:
        def interrupt() -> None:
            assert eventually(lambda: len(pids.read_text().split()) == 2 if pids.exists() else False)
            _thread.interrupt_main()

        pids = job.directory / "pids"
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            job.run(f"{HANGING}\ntime.sleep(100_000)")
        assert all_have_ended(job.directory)

    def test_orphan_that_keeps_the_pipes_open_does_not_block_the_job(self, job: Job) -> None:
        program = "pid = os.fork()\nif pid == 0:\n    os.setsid()\n    time.sleep(100_000)\n"
        program += "open('pid', 'w').write(str(pid))\n"
        program += f"sys.stdout.write({event_lines(*READY)!r})\ntime.sleep(100_000)\n"
        job.run(program, scaled(4), sandbox_s=0.2)
        os.kill(int((job.directory / "pid").read_text()), signal.SIGKILL)


class TestDaemons:
    def test_daemon_that_cannot_be_started_ends_the_job_and_is_the_cause(self, job: Job) -> None:
        program = "print('@csdctl-daemon rank1-csd1 prted --x 1')\ntime.sleep(100_000)"
        outcome = job.run(program, scaled(30))
        assert not outcome.is_overdue
        assert job.asked == [("rank1-csd1", "prted --x 1")]
        assert outcome.stderr_tail[0] == "does not answer"
        assert find_cause(outcome).node == "csd1"

    def test_ranks_and_daemons_on_nodes_ask_for_no_daemons(self, job: Job) -> None:
        """mpirun prints it as its own, and only the agent on its machine knows the secret."""
        job.request = f"{REQUEST}0123abcd "
        of_rank = f"{job.request}rank1-csd1 prted"
        job.print(tag(1, of_rank) + tag(1, of_rank, "stderr") + f"{REQUEST}rank1-csd1 prted\n")
        assert job.asked == []
        job.print(f"{job.request}rank0-csd0 prted\n")
        assert job.asked == [("rank0-csd0", "prted")]


def test_job_that_is_ended_before_its_start_leaves_nothing_running(job: Job) -> None:
    ended = job.make("time.sleep(100_000)")
    ended.end()
    assert ended.run().exit_code != 0


NODES = ["host", "csd0", "csd1"]
LOST_DAEMON = """\
--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-storage-4711@0,0] on node storage
  Remote daemon: [prterun-storage-4711@0,2] on node csd1

This is usually due to either a failure of the TCP network
--------------------------------------------------------------------------
""".splitlines()


SIGNALLED = ["prterun noticed that process rank 1 with PID 0 on node csd0 exited on signal 11."]


@pytest.mark.parametrize(
    ("printed", "exited", "nodes", "node", "message"),
    [
        (LOST_DAEMON, [Exited(2, "csd1", 137), Exited(0, "host", 1)], NODES, "csd1", "likely out of memory"),
        ([], [Exited(0, "host", 128 + 15), Exited(1, "csd0", 139)], NODES, "csd0", "killed by signal 11"),
        (LOST_DAEMON, [], NODES, "csd1", "lost"),
        (LOST_DAEMON, [], ["csd7", "host", "csd8"], "csd8", "lost"),
        (SIGNALLED, [], NODES, "csd0", "signal 11"),
    ],
    ids=["killed first", "mpirun ended the other", "daemon", "host between the nodes", "signal"],
)
def test_node_that_was_lost_first_is_the_cause(
    printed: list[str], exited: list[Exited], nodes: list[str], node: str, message: str
) -> None:
    cause = find_cause(JobOutcome(exited, nodes, stderr_tail=printed))
    assert cause.node == node
    assert message in cause.message


@pytest.mark.parametrize("number", [3, 99])
def test_unknown_rank_or_daemon_number_names_no_node(number: int) -> None:
    for line in (f"process rank {number} exited", f"Remote daemon: [prterun-x@0,{number}] on node y"):
        assert find_cause(JobOutcome([], NODES, stderr_tail=[line])).node == ""


HARMLESS = """\
--------------------------------------------------------------------------
WARNING: An invalid value was given for oob_tcp_if_include.  This
value will be ignored.

  Local host: storage
  Value:      10.1.1.0/24
  Message:    Did not find interface matching this subnet
--------------------------------------------------------------------------
\x00"""
AGGREGATED = "2 more processes have sent help message help-oob-tcp.txt / invalid if_inexclude\n"


@pytest.mark.parametrize("before", [HARMLESS, HARMLESS * 2 + AGGREGATED])
def test_harmless_warning_is_neither_logged_nor_a_cause(job: Job, before: str) -> None:
    assert job.print(before).stderr_tail == []
    assert job.text(None) == ""
    real = "There are no allocated resources.\nLocal host: storage\n"
    outcome = job.print(before + real)
    assert find_cause(outcome).message == "There are no allocated resources."
    assert job.text(None) == real, "a message that has lines of the same form stays"


def test_last_line_of_a_daemon_that_failed_is_part_of_the_cause(job: Job) -> None:
    lines = ["Traceback (most recent call last):", "OSError: [Errno 27] File too large", "", "-----"]
    session = LocalSession("csd1", job.directory)
    program = f"print(*{lines!r}, sep=chr(10)); raise SystemExit(7)"
    job.start_daemon = lambda host, command: session.converse([sys.executable, "-c", program])  # type: ignore[method-assign]
    outcome = job.run("print('@csdctl-daemon rank1-csd1 prted')\ntime.sleep(100_000)", scaled(30))
    assert find_cause(outcome).node == "csd1"
    assert "exited with 7: OSError: [Errno 27] File too large" in find_cause(outcome).message


def test_daemon_that_never_connected_is_named_by_its_node() -> None:
    printed = ["A daemon failed to report back after being spawned. This could", "  Local host:    vm"]
    printed += ["  Remote host:   rank2-csd1", "  Daemon exit status: 213"]
    cause = find_cause(JobOutcome([], NODES, stderr_tail=printed))
    assert cause.node == "csd1"
    assert "did not connect to mpirun and exited with 213" in cause.message
    others = [line.replace("csd1", "other") for line in printed]
    assert find_cause(JobOutcome([], NODES, stderr_tail=others)).node == ""


CONTROL = TrafficClass.CONTROL


def traffic(generation: int, *sent: tuple[str, int, int, int]) -> Traffic:
    return Traffic(0, "host", generation, tuple(SentBytes(*row) for row in sent))


def test_counts_of_a_group_replace_each_other_and_those_of_groups_add_up() -> None:
    """Activations of private samples must never be shown as anything else."""
    events = [
        traffic(1, (SUMS, 1, 0, 10)),
        traffic(1, (SUMS, 1, 0, 25), (SUMS, 0, 1, 7), (STATE, 0, 2, 3), (SAMPLES, 0, 2, 4)),
        traffic(2, (SUMS, 1, 0, 100), (ACTIVATIONS, 2, 0, 9)),
    ]
    assert add_rank_traffic(events, NODES) == {
        ("csd0", "host", TrafficClass.GRADIENT): 125,
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
    outcomes = [JobOutcome([], connection_bytes={("10.0.0.1 40000", peer): (5, 70)}) for _ in range(2)]
    expected = {("host", name, CONTROL): 10, (name, "host", CONTROL): 140} if name else {}
    assert add_mpirun_traffic(outcomes, fleet) == expected
