"""Many machines at once, and the bytes on their links."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import CsdctlError, HostKeyError, NodeError, UnreachableError
from csdctl.fleet.model import Fleet, Node
from csdctl.transport.many import Outcome, open_sessions, run_on_all, run_on_nodes
from csdctl.transport.meter import Meter, TrafficClass, add_up
from csdctl.transport.ssh import connect
from tests.patience import WAIT_S, eventually, scaled
from tests.unit.transport.test_session_contract import is_alive


def test_one_failure_does_not_stop_the_others() -> None:
    def work(number: int) -> int:
        if number == 1:
            raise UnreachableError("gone", node="b")
        if number == 2:
            raise KeyError("surprise")
        return number

    items = {"a": 0, "b": 1, "c": 2, "d": 3}
    outcomes = run_on_all(items, work)
    assert list(outcomes) == [*items]
    assert (outcomes["a"].get(), outcomes["d"].get()) == (0, 3)
    assert isinstance(outcomes["c"].error, NodeError)
    assert isinstance(outcomes["c"].error.__cause__, KeyError)
    with pytest.raises(UnreachableError):
        outcomes["b"].get()


def test_sessions_open_for_all_that_can_be_reached(server: Any, tmp_path: Path) -> None:
    unknown = Node("csd2", "localhost", server.port, "tester", server.key)
    fleet = Fleet((server.node(), server.node(name="csd1", port=1), unknown), path=tmp_path / "fleet.yaml")
    server.trust_in(tmp_path)
    with open_sessions(fleet, directory=tmp_path) as sessions:
        assert list(sessions.reachable) == ["host", "csd0"]
        assert isinstance(sessions.failed["csd1"], UnreachableError)
        assert isinstance(sessions.failed["csd2"], HostKeyError)
        assert sessions.reachable["host"].run(["pwd"]).output == f"{tmp_path}\n"
        assert sessions.reachable["csd0"].run(["pwd"]).output == f"{server.state}\n"
    with pytest.raises(CsdctlError):
        sessions.reachable["csd0"].run(["true"])


def test_interruption_ends_what_runs_on_the_nodes_also_behind_a_jump_host(
    server: Any, gate: Any, tmp_path: Path
) -> None:
    jump = gate.node(name="gate")
    fleet = Fleet((server.node(), server.node(name="far", jump=jump)), path=tmp_path / "fleet.yaml")
    started = [threading.Event(), threading.Event()]

    def work(session: Any) -> None:
        if session.name == "host":
            assert all(event.wait(scaled(WAIT_S)) for event in started)
            return
        pid = server.state / f"{session.name}.pid"
        conversation = session.converse(["sh", "-c", f"echo $$ >{pid}; echo started; exec sleep 600"])
        conversation.read_line(deadline_s=scaled(20))
        started[session.name == "far"].set()
        conversation.wait(deadline_s=600)

    def interrupt(outcome: Outcome[None]) -> None:
        raise KeyboardInterrupt

    server.trust_in(tmp_path)
    gate.trust_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_on_nodes(fleet, work, directory=tmp_path, has_host=True, on_done=interrupt)
    pids = [int((server.state / f"{name}.pid").read_text()) for name in ("csd0", "far")]
    assert eventually(lambda: not any(is_alive(pid) for pid in pids))


def test_closing_a_session_ends_a_command_that_another_thread_is_starting(
    server: Any, tmp_path: Path
) -> None:
    session, pid_file = connect(server.node(), [server.known_hosts]), server.state / "pid"
    with ThreadPoolExecutor() as pool:
        run = pool.submit(session.run, ["sh", "-c", f"echo $$ >{pid_file}; exec sleep 600"])
        session.close()
        assert isinstance(run.exception(), CsdctlError)
    assert not pid_file.exists() or eventually(lambda: not is_alive(int(pid_file.read_text() or "0")))
    with pytest.raises(UnreachableError, match="closed"):
        session.run(["true"])


GATE = Node("gate", "10.0.0.1")
INNER = Node("inner", "10.1.0.1", jump=GATE)
FAR = Node("far", "10.2.0.9", jump=INNER)


def meter(sent: int, received: int, **noted: int) -> Meter:
    meter = Meter()
    meter.num_sent, meter.num_received = sent, received
    for kind, count in noted.items():
        meter.record(TrafficClass(kind), sent=count)
    return meter


def test_bytes_through_a_jump_host_count_once_per_link() -> None:
    """And connections to one machine add up."""
    behind = Node("csd1", "10.1.0.2", jump=GATE)
    added = add_up([(GATE, meter(150, 50)), (GATE, meter(0, 10)), (behind, meter(100, 40, code=70))])
    assert added == {
        ("host", "gate", TrafficClass.CODE): 70,
        ("host", "gate", TrafficClass.CONTROL): 80,
        ("gate", "host", TrafficClass.CONTROL): 60,
        ("gate", "csd1", TrafficClass.CODE): 70,
        ("gate", "csd1", TrafficClass.CONTROL): 30,
        ("csd1", "gate", TrafficClass.CONTROL): 40,
    }
    nested = add_up([(GATE, meter(200, 0)), (INNER, meter(150, 0)), (FAR, meter(100, 0))])
    assert nested == {
        ("host", "gate", TrafficClass.CONTROL): 200,
        ("gate", "inner", TrafficClass.CONTROL): 150,
        ("inner", "far", TrafficClass.CONTROL): 100,
    }
