"""What a login shell makes of csdctl's command lines: nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from csdctl.transport.commands import Setting, build_wrapped_command

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
