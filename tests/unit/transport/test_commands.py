"""How commands are wrapped, and what a login shell makes of that: nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.errors import InputError
from csdctl.transport.commands import MarkedOutput, Setting, build_kill_command, build_wrapped_command

POSIX_SHELLS = [[shell] for shell in ("dash", "bash", "zsh", "ksh", "mksh") if shutil.which(shell)]
POSIX_SHELLS += [["busybox", "sh"]] if shutil.which("busybox") else []


@pytest.mark.parametrize("shell", POSIX_SHELLS, ids=lambda shell: shell[0])
@pytest.mark.parametrize("is_leader", [True, False])
@pytest.mark.parametrize(("is_users", "limits"), [(True, "20 8"), (False, "99 unlimited")])
def test_wrapper_works_in_every_posix_shell_and_raises_the_soft_limits_of_csdctls_programs(
    shell: list[str], is_leader: bool, is_users: bool, limits: str
) -> None:
    lowered = ["bash", "-c", 'ulimit -Sn 20; ulimit -Hn 99; ulimit -Sf 8; exec "$@"', "bash", *shell]
    program = ["bash", "-c", 'echo "$1" $(ulimit -n) $(ulimit -f); cat; echo e >&2; exit 7', "x", "a b"]
    wrapped = build_wrapped_command(program, deadline_s=50, is_users=is_users)
    done = subprocess.run(
        [*lowered, *wrapped.argv[1:]],
        input=wrapped.script + b"input",
        capture_output=True,
        start_new_session=is_leader,
        check=False,
    )
    stdout, stderr = (MarkedOutput(wrapped.token, max_bytes=100) for _ in range(2))
    stdout.feed(done.stdout)
    stderr.feed(done.stderr)
    assert (done.returncode, stdout.kept, stderr.kept) == (7, f"a b {limits}\ninput".encode(), b"e\n")
    assert stderr.group > 1


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 7), st.binary(max_size=30))
def test_output_is_found_in_chunks_of_any_size(chunks: list[bytes], cut: int, preamble: bytes) -> None:
    content = b"".join(chunks)
    stream = preamble + b"csdctl-0 123\n" + content
    output = MarkedOutput("csdctl-0", max_bytes=10_000)
    fed = b"".join(output.feed(stream[start : start + cut]) for start in range(0, len(stream), cut))
    assert (fed, output.kept, output.group, bytes(output.preamble)) == (content, content, 123, preamble)


@given(st.lists(st.binary(max_size=50)), st.integers(1, 30), st.booleans())
def test_kept_output_is_the_beginning_or_the_end(chunks: list[bytes], max_bytes: int, keep_end: bool) -> None:
    output = MarkedOutput("t", max_bytes=max_bytes, keep_end=keep_end)
    output.feed(b"t\n")
    for chunk in chunks:
        output.feed(chunk)
    content = b"".join(chunks)
    assert output.kept == (content[-max_bytes:] if keep_end else content[:max_bytes])


def test_endless_preamble_stays_bounded() -> None:
    output = MarkedOutput("token", max_bytes=10)
    for _ in range(100):
        output.feed(b"x" * 10_000)
    assert len(output.preamble) <= MarkedOutput.MAX_PREAMBLE_BYTES
    assert output.feed(b"token\nrest") == b"rest"


@pytest.mark.parametrize("said", ["1", "-7", "0x10", "7 8", "9" * 11, "9" * 5000])
def test_impossible_process_groups_are_not_believed(said: str) -> None:
    output = MarkedOutput("token", max_bytes=10)
    assert output.feed(f"token {said}\nx".encode()) == b""
    assert (output.has_started, output.group) == (False, 0)
    assert output.feed(b"token 77\nrest") == b"rest"
    assert output.group == 77


@pytest.mark.parametrize("group", [-1, 0, 1])
def test_only_own_process_groups_can_be_ended(group: int) -> None:
    with pytest.raises(ValueError, match="not a process group"):
        build_kill_command(group)


def test_one_argument_longer_than_linux_takes_is_refused() -> None:
    with pytest.raises(InputError, match="longer than"):
        build_wrapped_command(["echo", "x" * 130_000], deadline_s=1)


SHELLS = {
    **{name: (name,) for name in ("bash", "dash", "zsh", "ksh", "mksh", "fish", "tcsh", "csh")},
    "busybox": ("busybox", "sh"),
    "rbash": ("bash", "--restricted"),
}
PACKAGES = {"ksh": "ksh93u+m", "rbash": "bash"}
NAMES = [pytest.param(name, marks=pytest.mark.needs(PACKAGES.get(name, name))) for name in SHELLS]
in_every_shell = pytest.mark.parametrize("name", NAMES)
ARGUMENTS = [
    *("", " ", "a b", "\t", "\n", "end\n\n", "\r", "two\nlines", "-", "-\n", "-n", "--", "-e", "=", "A=1"),
    *("\\", "\\\\", "a\\\\b", "a\\'b", "a\\", "\\n", "'", "''", "a'b", '"', '"$HOME"', "`id`", "$(id)"),
    *("$HOME", "${x}", "!", "!!", "!ls", "^a^b", "*", "?", "[a-z]", "{a,b}", "~", "~root", "#", ";", "&"),
    *("|", "<", ">", "(", ")", "%", "%s", "%1", "@", "é", "\u0141\u0101", "日本", "\udcff\udc81\udc88"),
    *("\x01\x1b[0m", "\x7f", "x" * 5000),
]
PROGRAM = "import os,sys;os.write(1,b'\\0'.join(map(os.fsencode,sys.argv[1:])))"


def run_in(name: str, arguments: list[str], home: Path, *, is_users: bool = True) -> list[bytes]:
    """Return the arguments that a command received from the login shell of an account with `home`."""
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, *arguments]
    wrapped = build_wrapped_command(command, deadline_s=50, is_users=is_users, setting=Setting({}, ""))
    done = subprocess.run(
        [*SHELLS[name], "-c", wrapped.command_line],
        input=wrapped.script,
        capture_output=True,
        env={"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{wrapped.token}\n".encode())
    return done.stdout.partition(b"\n")[2].split(b"\0")


@in_every_shell
@pytest.mark.parametrize("is_users", [True, False])
@pytest.mark.fault(62)
def test_arguments_arrive_byte_by_byte(name: str, tmp_path: Path, is_users: bool) -> None:
    assert run_in(name, ARGUMENTS, tmp_path, is_users=is_users) == list(map(os.fsencode, ARGUMENTS))


@in_every_shell
def test_terminal_as_standard_input_is_named(name: str) -> None:
    wrapped = build_wrapped_command(["true"], deadline_s=50)
    ours, theirs = os.openpty()
    try:
        command = [*SHELLS[name], "-c", wrapped.command_line]
        done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.returncode, wrapped.token in done.stdout) == (1, False)
    assert "standard input is a terminal" in done.stdout


def test_shell_sees_no_character_with_a_meaning_of_its_own() -> None:
    line = build_wrapped_command(
        ["echo", *ARGUMENTS], deadline_s=5, is_users=True, setting=Setting({}, "")
    ).command_line
    assert line.isascii()
    assert not set(line) & set("\\!\n^`~*?#&|<>(){}[]%")
    assert line.count("'") == 2
