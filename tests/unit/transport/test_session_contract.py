"""The contract of every real session: the same tests for the host and for SSH."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import DeadlineError, InputError, RemoteCommandError, UnreachableError
from csdctl.transport.session import MAX_OUTPUT_BYTES
from tests.patience import eventually, scaled
from tests.unit.transport.conftest import NASTY_NAMES

Machine = tuple[Any, Path]


@pytest.fixture
def session(machine: Machine) -> Any:
    return machine[0]


@pytest.fixture
def home(machine: Machine) -> Path:
    return machine[1]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(pid: int) -> bool:
    """Return whether a process ends."""
    return eventually(lambda: not is_alive(pid))


def wait_for_pid(path: Path) -> int:
    """Return the pid that a command writes to `path`."""
    assert eventually(lambda: path.exists() and path.read_text().endswith("\n")), f"{path} was never written"
    return int(path.read_text())


def test_command_starts_in_its_directory_and_returns_both_outputs(session: Any, home: Path) -> None:
    completed = session.run(["sh", "-c", "pwd; echo err >&2; exit 3"])
    assert (completed.exit_code, completed.output, completed.stderr) == (3, f"{home}\n", b"err\n")
    assert completed.command == ("sh", "-c", "pwd; echo err >&2; exit 3")


def test_arguments_arrive_unchanged(session: Any, home: Path) -> None:
    arguments = [*NASTY_NAMES, "plain", "$HOME", ""]
    completed = session.run(["printf", "%s|", *arguments])
    assert completed.stdout.decode() == "".join(f"{argument}|" for argument in arguments)
    assert not (home / "pwned").exists()


def test_programs_are_run_and_not_shell_builtins(session: Any) -> None:
    assert session.run(["echo", "a\\tb"]).stdout == b"a\\tb\n"
    assert session.run(["cd", "/"]).exit_code == 127


@pytest.mark.fault(22)
def test_killed_command_counts_as_137(session: Any) -> None:
    completed = session.run(["sh", "-c", "kill -KILL $$"])
    assert completed.exit_code == 137
    with pytest.raises(RemoteCommandError, match="out of memory"):
        completed.check(session.name, doing="a test")


def test_input_reaches_the_command_which_need_not_read_it(session: Any) -> None:
    content = os.urandom(1_000_000)
    assert session.run(["cat"], stdin=content).stdout == content
    assert session.run(["cat"]).stdout == b""
    assert session.run(["sh", "-c", "exit 4"], stdin=b"x" * 3_000_000, deadline_s=scaled(30)).exit_code == 4


@pytest.mark.fault(18)
@pytest.mark.fault(19)
def test_the_beginning_of_output_and_the_end_of_errors_are_kept(session: Any) -> None:
    """The errors come first, and are more than the pipe or SSH's window holds."""
    completed = session.run(["sh", "-c", "seq 1000000 >&2; seq 300000"], deadline_s=scaled(60))
    assert completed.stdout.startswith(b"1\n2\n")
    assert completed.stderr.endswith(b"\n1000000\n")
    assert len(completed.stdout) == len(completed.stderr) == MAX_OUTPUT_BYTES
    completed = session.run(["printf", r"\377\376caf\303"])
    assert (completed.stdout, completed.output) == (b"\xff\xfecaf\xc3", "��caf�")


@pytest.mark.fault(16)
def test_hanging_command_is_ended_at_the_deadline_with_all_its_processes(session: Any, home: Path) -> None:
    script = "trap '' TERM INT HUP; echo $$ >parent; sleep 1000 & echo $! >child; wait"
    deadline_s = round(scaled(2))
    with pytest.raises(DeadlineError, match=f"did not finish within {deadline_s} s") as caught:
        session.run(["sh", "-c", script], deadline_s=deadline_s)
    assert caught.value.node == session.name
    assert ends(wait_for_pid(home / "parent"))
    assert ends(wait_for_pid(home / "child"))


def test_processes_left_in_the_background_end_with_the_command(session: Any, home: Path) -> None:
    assert session.run(["sh", "-c", "sleep 1000 & echo $! >pid"], deadline_s=scaled(30)).exit_code == 0
    assert ends(wait_for_pid(home / "pid"))


def test_closing_the_session_ends_running_commands(session: Any, home: Path) -> None:
    with ThreadPoolExecutor() as pool:
        run = pool.submit(session.run, ["sh", "-c", "echo $$ >pid; exec sleep 1000"], deadline_s=900)
        pid = wait_for_pid(home / "pid")
        session.close()
        assert ends(pid)
        with pytest.raises(UnreachableError):
            run.result()


@pytest.mark.parametrize("command", [[], [""], ["-x"], ["echo", "a\0b"]])
def test_impossible_commands_are_refused(session: Any, command: list[str]) -> None:
    with pytest.raises(InputError):
        session.run(command)


def test_conversation_goes_line_by_line_and_continues_after_a_deadline(session: Any) -> None:
    talk = session.converse(["sh", "-c", 'while read -r line; do echo "got $line"; done; echo bye'])
    with pytest.raises(DeadlineError, match="did not respond"):
        talk.read_line(deadline_s=0.2)
    for line in ("one", "two words", "$(x)"):
        talk.send_line(line)
        assert talk.read_line(deadline_s=scaled(30)) == f"got {line}"
    completed = talk.wait(deadline_s=scaled(30))
    assert (completed.exit_code, completed.stdout) == (0, b"")
    talk.close()


def test_conversation_takes_bytes_at_the_pace_that_they_are_read(session: Any) -> None:
    content = os.urandom(1000) * 5000
    talk = session.converse(
        ["sh", "-c", "sleep 0.2; head -c 5000000 | sha256sum; exec 0<&-; echo closed; sleep 1000"]
    )
    talk.send_bytes(content)
    assert talk.read_line(deadline_s=scaled(30))[:64] == hashlib.sha256(content).hexdigest()
    assert talk.read_line(deadline_s=scaled(30)) == "closed"
    talk.close()


def test_conversation_raises_when_the_command_has_ended(session: Any) -> None:
    talk = session.converse(["sh", "-c", "printf unfinished; echo why >&2; exit 5"])
    with pytest.raises(EOFError, match="has ended"):
        talk.send_bytes(bytes(20_000_000))
    assert talk.read_line(deadline_s=scaled(30)) == "unfinished"
    with pytest.raises(EOFError):
        talk.read_line(deadline_s=scaled(30))
    completed = talk.wait(deadline_s=scaled(30))
    assert (completed.exit_code, completed.last_error_line) == (5, "why")
    with pytest.raises(EOFError):
        talk.send_line("x")
    talk.close()


def test_endless_line_is_an_error_and_not_endless_memory(session: Any) -> None:
    talk = session.converse(["cat", "/dev/zero"])
    with pytest.raises(RemoteCommandError, match="a line of more than"):
        talk.read_line(deadline_s=scaled(60))
    talk.close()


def test_closing_a_conversation_ends_the_process_group(session: Any, home: Path) -> None:
    talk = session.converse(["sh", "-c", "sleep 1000 & echo $! >child; echo $$; wait"])
    parent, child = int(talk.read_line(deadline_s=scaled(30))), wait_for_pid(home / "child")
    talk.close()
    talk.close()
    assert ends(parent)
    assert ends(child)
