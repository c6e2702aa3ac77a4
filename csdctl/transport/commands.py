"""Command lines for a machine: the script around all commands, csdctl/standalone as source, the worker; pure.

The script runs the command in its own process group, prints the group's id, ends the group when the command
ends, and ends it shortly after the deadline even without csdctl, so that nothing stays behind when the
connection or csdctl is lost. It needs only a POSIX `sh`: `setsid` is used only where the SSH server did not
make the shell a group leader.

Login shells may print at start-up. A random token on both streams marks where the output of the command
begins; earlier output is dropped.

The programs of csdctl/standalone run on a machine before anything is installed there. They need only Python.
`-I -S` keeps the user's modules out and halves the start-up time.
"""

import base64
import math
import re
import secrets
import shlex
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from csdctl.errors import InputError

MAX_COMMAND_LINE_BYTES = 120_000
"""Linux rejects a single argument above 128 KiB, and `sh -c` gets the line as one argument."""

WATCHDOG_GRACE_S = 2
"""Time after csdctl's deadline at which the node ends the command on its own."""

_UMASK = "umask 077\n"

# Is the shell a group leader already (with OpenSSH it is)? /proc/PID/stat: pid (name) state ppid pgrp …
_OUTER = """\
csdctl_inner=$1; shift
read -r csdctl_stat </proc/$$/stat; csdctl_stat=${csdctl_stat##*) }
csdctl_stat=${csdctl_stat#* }; csdctl_stat=${csdctl_stat#* }; csdctl_group=${csdctl_stat%% *}
if [ "$csdctl_group" = "$$" ]; then eval "$csdctl_inner"
elif command -v setsid >/dev/null 2>&1
then exec setsid sh -c "csdctl_group=\\$\\$; $csdctl_inner" csdctl "$@"
else csdctl_group=0; eval "$csdctl_inner"
fi"""

# `(exec "$@")` runs the program of that name, never a shell builtin.
_INNER = """\
csdctl_token=$1 csdctl_seconds=$2 csdctl_watchdog=; shift 2
printf '%s\\n' "$csdctl_token"
printf '%s %s\\n' "$csdctl_token" "$csdctl_group" >&2
if [ "$csdctl_seconds" != 0 ] && [ "$csdctl_group" != 0 ]; then
(exec </dev/null >/dev/null 2>&1; trap 'kill -KILL $!; exit' TERM
sleep "$csdctl_seconds" & wait $!; kill -KILL "-$$") &
csdctl_watchdog=$!
fi
(exec "$@")
csdctl_code=$?
"""

# TERM is ignored only after the command has ended, because children inherit ignored signals.
_END = """\
if [ "$csdctl_group" != 0 ]; then trap '' TERM; kill -TERM "-$$" 2>/dev/null; fi
exit $csdctl_code"""

# The user's own command, as after a login: what it leaves in the background stays; the watchdog does not.
_END_OF_USER = """\
if [ -n "$csdctl_watchdog" ]; then kill -TERM "$csdctl_watchdog" 2>/dev/null; fi
exit $csdctl_code"""

_GROUP = re.compile(rb"(0|[1-9][0-9]{1,9}|[2-9])?")
"""The rest of the token's line: a process group's id, 0 if there is none, or nothing. 1 is never csdctl's."""


@dataclass(frozen=True)
class WrappedCommand:
    """A wrapped command: its argument list, and the token that its output begins with."""

    command: tuple[str, ...]
    argv: tuple[str, ...]
    token: str

    @property
    def command_line(self) -> str:
        """The argument list as one string for a remote login shell; raises InputError when too long."""
        line = "exec " + shlex.join(self.argv)
        if len(line.encode(errors="surrogateescape")) > MAX_COMMAND_LINE_BYTES:
            raise InputError(
                f"`{self.command[0]}` with its arguments is longer than {MAX_COMMAND_LINE_BYTES} bytes",
                remedy="send the long part as standard input",
            )
        return line


def build_wrapped_command(
    command: Sequence[str], *, deadline_s: float | None, is_users: bool = False
) -> WrappedCommand:
    """Wrap `command`; with `deadline_s` None it runs until it is ended.

    What it creates is for the user alone, and what it leaves in the background is ended with it; unless it
    `is_users`, the user's own command: that one runs as after a login.

    Raises InputError for an empty command or an argument with a NUL byte.
    """
    if not command or not command[0] or command[0].startswith("-"):
        raise InputError(f"not a command: {list(command)!r}")
    for argument in command:
        if "\0" in argument:
            raise InputError(f"an argument of `{command[0]}` contains a NUL byte: {argument!r}")
    token = f"csdctl-{secrets.token_hex(8)}"
    seconds = 0 if deadline_s is None else math.ceil(deadline_s) + WATCHDOG_GRACE_S
    outer, end = (_OUTER, _END_OF_USER) if is_users else (_UMASK + _OUTER, _END)
    argv = ("sh", "-c", outer, "csdctl", _INNER + end, token, str(seconds), *command)
    return WrappedCommand(tuple(command), argv, token)


# What `sudo` has started belongs to root, and is killed by root.
_KILL = """\
is_alive() {
  for file in /proc/[0-9]*/stat; do
    read -r line <"$file" || continue
    line=${line##*) }
    set -- "$1" $line
    [ "$4" = "$1" ] && [ "$2" != Z ] && return 0
  done 2>/dev/null
  return 1
}
kill -KILL "-$1" 2>/dev/null
is_alive "$1" || exit 0
sleep 1
is_alive "$1" || exit 0
sudo -n kill -KILL -- "-$1" 2>/dev/null
sleep 1
! is_alive "$1"
"""


def build_kill_command_line(group: int) -> str:
    """Return the command line that kills process group `group`, for a remote login shell.

    Its exit code is 0 if nothing of the group is left.
    """
    if group <= 1:
        raise ValueError(f"not a process group of csdctl: {group}")
    return shlex.join(["sh", "-c", _KILL, "csdctl-kill", str(group)])


class MarkedOutput:
    """The bounded output of a command on one stream, from the wrapper's token on.

    Keeps the beginning, or with `keep_end` the end. `group` is the process group printed after the token, or
    0.
    """

    MAX_PREAMBLE_BYTES = 1 << 16

    def __init__(self, token: str, *, max_bytes: int, keep_end: bool = False) -> None:
        self._token = token.encode()
        self._max_bytes = max_bytes
        self._keep_end = keep_end
        self._kept = bytearray()
        self._line_start = 0
        self.preamble = bytearray()
        self.has_started = False
        self.group = 0

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream; return those written by the command."""
        if not self.has_started:
            start, end = self._find_marker(data)
            if not end:
                return b""
            self.has_started = True
            data = bytes(self.preamble[end:])
            del self.preamble[start:]
        self._keep(data)
        return data

    def _find_marker(self, data: bytes) -> tuple[int, int]:
        """Add `data` to the preamble; return start and end of the token and its line's rest.

        Both are 0 when it is missing.

        A shell that traces commands (`set -x`) prints the token too, followed by other text. Each line is
        searched once, when it is complete: a server may send it byte by byte.
        """
        searched = len(self.preamble)
        self.preamble += data
        while end := self.preamble.find(b"\n", searched) + 1:
            before, token, rest = bytes(self.preamble[self._line_start : end]).rpartition(self._token)
            if token and _GROUP.fullmatch(rest.strip()):
                self.group = int(rest.strip() or 0)
                return self._line_start + len(before), end
            searched = self._line_start = end
        num_dropped = max(0, len(self.preamble) - self.MAX_PREAMBLE_BYTES)
        del self.preamble[:num_dropped]
        self._line_start = max(0, self._line_start - num_dropped)
        return 0, 0

    @property
    def kept(self) -> bytes:
        """The retained bytes."""
        return bytes(self._kept[-self._max_bytes :] if self._keep_end else self._kept)

    def _keep(self, data: bytes) -> None:
        if self._keep_end:
            self._kept += data
            if len(self._kept) > 2 * self._max_bytes:
                del self._kept[: -self._max_bytes]
        else:
            self._kept += data[: self._max_bytes - len(self._kept)]


def build_program_command(python: str, module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the argument list that runs csdctl/standalone/MODULE.py on its own.

    The source is packed, because dropbear accepts command lines of 9000 bytes.
    """
    packed = base64.b85encode(zlib.compress(read_program(module).encode())).decode()
    program = f'import base64,zlib;exec(zlib.decompress(base64.b85decode("{packed}")))'
    return [python, "-I", "-S", "-c", program, *arguments]


def build_child_command(command: Sequence[str], parent: int) -> list[str]:
    """Return the argument list that runs a program of this host that ends with process `parent`.

    The thread that starts it must wait for it: for the kernel, that thread is the parent.
    """
    return build_program_command(sys.executable, "child", [str(parent), *command])


def read_program(module: str) -> str:
    """Return the source of csdctl/standalone/MODULE.py."""
    return (resources.files("csdctl") / "standalone" / f"{module}.py").read_text(encoding="utf-8")


# The file that was read is the file that runs, whatever its path leads to when more modules are imported.
# Functions of the user's number classes by sets: all machines and data sets need one order of them.
_RUN_CHECKED = (
    "import hashlib,os,runpy,sys;"
    "seeded={**os.environ,'PYTHONHASHSEED':'0'};"
    "seeded==os.environ or os.execve(sys.executable,sys.orig_argv,seeded);"
    "sys.argv.pop(0);"
    "path=sys.argv[0];"
    "file=open(path,'rb');"
    "is_same=os.path.basename(path).startswith(hashlib.sha256(file.read()).hexdigest());"
    "is_same or sys.exit(path+' has been changed since csdctl sent it: deploy again');"
    "runpy.run_path('/proc/self/fd/%d'%file.fileno(),run_name='__main__')"
)


def build_worker_command(python: str, worker_path: str, arguments: Sequence[str]) -> list[str]:
    """Return the argument list that runs the worker's command `arguments[0]`.

    `worker_path` is a file of the store. It is run only with the content that its name states.
    """
    return [python, "-P", "-u", "-c", _RUN_CHECKED, worker_path, *arguments]
