"""How a program starts on a machine: its command line, environment, directory and process group. Pure.

A login shell may be any program. It gets one command line of characters that all shells leave alone. The line
starts a POSIX `sh`, which prints a token and reads one line from standard input: the script of this module
with the command's arguments (docs/decisions/0051). Output before the token is dropped.

The script runs the command in its own process group, prints the group's id, and ends the group when the
command ends, or shortly after the deadline even without csdctl. `setsid` is for SSH servers that did not make
the shell a group leader.

The programs of csdctl/standalone need only Python. `-I -S` halves their start-up time.
"""

import base64
import math
import re
import secrets
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from csdctl.errors import InputError

MAX_ARGUMENT_BYTES = 120_000
"""Linux rejects a single argument above 128 KiB."""

WATCHDOG_GRACE_S = 2
"""Time after csdctl's deadline at which the node ends the command on its own."""

MERGE_STREAMS = ("sh", "-c", 'exec "$@" 2>&1', "csdctl")
"""In front of a command: its errors come in its output, in the order in which both are written."""

KEPT_VARIABLES = (
    "HOME USER LOGNAME SHELL PATH TMPDIR TZ CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES CSDCTL_CPU_LIMIT "
    "CSDCTL_MEMORY_LIMIT CSDCTL_EMULATED_FLEET CSDCTL_EMULATED_NODE"
)
"""The variables of a machine's environment that csdctl's own programs get."""
SET_VARIABLES = {"LC_ALL": "C", "PYTHONHASHSEED": "0", "PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1"}
"""Variables that csdctl's own programs get, unless `env` in fleet.yaml has another value.

A user's function may number classes in the order of a set, which must be the same on all machines.
"""

CANNOT_ENTER = 119
"""Exit code of the script when the machine has no usable state directory. Standard error says why."""

_UMASK = "umask 077\n"
# Raises soft limits that a start-up file has lowered. `-u` of bash is `-p` of dash.
_RAISE = """\
for csdctl_name in n u p f v d t; do ulimit -S -$csdctl_name $(ulimit -H -$csdctl_name); done 2>/dev/null
"""
# With OpenSSH, the shell is a group leader already. /proc/PID/stat has: pid (name) state ppid pgrp …
_OUTER = """\
csdctl_inner=$1; shift
read -r csdctl_stat </proc/$$/stat; csdctl_stat=${csdctl_stat##*") "}
csdctl_stat=${csdctl_stat#* }; csdctl_stat=${csdctl_stat#* }; csdctl_group=${csdctl_stat%% *}
if [ "$csdctl_group" = "$$" ]; then eval "$csdctl_inner"
elif command -v setsid >/dev/null 2>&1
then exec setsid sh -c "csdctl_group=\\$\\$; $csdctl_inner" csdctl "$@"
else csdctl_group=0; eval "$csdctl_inner"
fi"""
_BEGIN = """\
csdctl_token=$1 csdctl_seconds=$2 csdctl_watchdog=; shift 2
printf '%s %s\\n' "$csdctl_token" "$csdctl_group" >&2
"""
_WATCH = """\
if [ "$csdctl_seconds" != 0 ] && [ "$csdctl_group" != 0 ]; then
(exec </dev/null >/dev/null 2>&1; trap 'kill -KILL $!; exit' TERM
sleep "$csdctl_seconds" & wait $!; kill -KILL "-$$") &
csdctl_watchdog=$!
fi
"""
# Many machines may share a home (NFS), and one machine may have many homes. Machines of one image have the
# same machine-id, and boards of one kind have the same name.
_ENTER = f"""\
csdctl_refuse() {{ printf '%s\\n' "$1" >&2; exit {CANNOT_ENTER}; }}
csdctl_state=$1; shift
if [ -z "$csdctl_state" ]; then
[ -d "$HOME" ] || csdctl_refuse "the home directory '$HOME' does not exist"
csdctl_state=$HOME/.csdctl
fi
csdctl_id=; read -r csdctl_name </proc/sys/kernel/hostname
[ ! -r /etc/machine-id ] || read -r csdctl_id </etc/machine-id || :
csdctl_state=$csdctl_state/machines/${{csdctl_name%%/*}}-${{csdctl_id%"${{csdctl_id#????????}}"}}
csdctl_why=$(mkdir -p "$csdctl_state" 2>&1) && cd "$csdctl_state" ||
csdctl_refuse "${{csdctl_why:-$csdctl_state cannot be entered}}"
[ -O . ] || csdctl_refuse "$csdctl_state belongs to another user"
"""
# `env` takes the last of several values of one variable. Unlike `exec`, it never runs a shell builtin.
_FILTER = f"""\
for csdctl_name in {KEPT_VARIABLES}; do
eval "[ -z \\"\\${{$csdctl_name+x}}\\" ] || set -- \\"$csdctl_name=\\$$csdctl_name\\" \\"\\$@\\""
done
(exec env -i "$@")
csdctl_code=$?
"""
# `(exec "$@")` runs the program of that name, never a shell builtin.
_RUN = """\
(exec "$@")
csdctl_code=$?
"""
# TERM is ignored only after the command has ended, because children inherit ignored signals.
_END = """\
if [ "$csdctl_group" != 0 ]; then trap '' TERM; kill -TERM "-$$" 2>/dev/null; fi
exit $csdctl_code"""
# A command of the user runs as after a login. Its background processes stay, but the watchdog ends.
_END_OF_USER = """\
if [ -n "$csdctl_watchdog" ]; then kill -TERM "$csdctl_watchdog" 2>/dev/null; fi
exit $csdctl_code"""
_GROUP = re.compile(rb"(0|[1-9][0-9]{1,9}|[2-9])?")
"""The rest of the token's line: a process group's id, 0 for none, or nothing. 1 is never csdctl's."""
_PLAIN = re.compile(r"[ -~]*")
# Processes that `sudo` has started belong to root, so root kills them.
_KILL = """\
is_alive() {
  for file in /proc/[0-9]*/stat; do
    read -r line <"$file" || continue
    line=${line##*") "}
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
IMPORT_SITE = (
    "import sys;"
    "''in sys.path[:1] and sys.path.pop(0);"
    "import os;"
    "'PYTHONPATH'in os.environ or sys.modules.update(sitecustomize=None,usercustomize=None);"
    "import site;"
    "site.main();"
)
"""The first statement of a Python program that runs with PYTHON_FLAGS and uses installed packages.

It imports nobody's sitecustomize, unless `env` of fleet.yaml names PYTHONPATH.
"""
PYTHON_FLAGS = ("-S", "-u")
# Runs the open file that was checked. Its path may lead to another file when more modules are imported.
_RUN_CHECKED = IMPORT_SITE + (
    "import hashlib,runpy;"
    "sys.argv.pop(0);"
    "path=sys.argv[0];"
    "file=open(path,'rb');"
    "is_same=os.path.basename(path).startswith(hashlib.sha256(file.read()).hexdigest());"
    "is_same or sys.exit(path+' has been changed since csdctl sent it: deploy again');"
    "runpy.run_path('/proc/self/fd/%d'%file.fileno(),run_name='__main__')"
)


@dataclass(frozen=True)
class Setting:
    """Where csdctl's own programs start on a machine, and the variables that they get."""

    variables: Mapping[str, str] = field(default_factory=dict)
    state: str | None = None
    """The directory with the state directories of machines, '' for ~/.csdctl. None: the login directory."""


def find_state_directory(state: str = "") -> Path:
    """Return the state directory of this machine, in which its sessions start. `state`: as in `Setting`."""
    id_file = Path("/etc/machine-id")
    machine = id_file.read_text(encoding="ascii", errors="replace")[:8].strip() if id_file.exists() else ""
    name = Path("/proc/sys/kernel/hostname").read_text(encoding="utf-8").strip().partition("/")[0]
    return (Path(state) if state else Path.home() / ".csdctl") / "machines" / f"{name}-{machine}"


@dataclass(frozen=True)
class WrappedCommand:
    """A command, the token at the beginning of its output, and the script that starts it."""

    command: tuple[str, ...]
    token: str
    script: bytes
    """The line that the started `sh` reads first."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The argument list that starts it."""
        # A terminal changes the bytes that pass it, such as the terminal of `script` in a ForceCommand.
        refuse = "if test -t 0; then echo standard input is a terminal: see ForceCommand of sshd; exit 1; fi"
        begin = f'echo {self.token}; IFS= read -r csdctl_line; eval "$csdctl_line"'
        return ("sh", "-c", f"{refuse}; {begin}")

    @property
    def command_line(self) -> str:
        """The argument list as a line for any login shell: no backslash, `!`, newline or `exec`."""
        return shlex.join(self.argv)


def build_wrapped_command(
    command: Sequence[str], *, deadline_s: float | None, is_users: bool = False, setting: Setting = Setting()
) -> WrappedCommand:
    """Wrap `command`. With `deadline_s` None it runs until it is ended.

    A program of csdctl runs in `setting`. Only its user can read what it creates, and what it leaves in the
    background ends with it. With `is_users`, the command runs as after a login. Raises InputError for an
    argument list that cannot be a command.
    """
    if not command or not command[0] or command[0].startswith("-"):
        raise InputError(f"not a command: {list(command)!r}")
    token = f"csdctl-{secrets.token_hex(8)}"
    seconds = 0 if deadline_s is None else math.ceil(deadline_s) + WATCHDOG_GRACE_S
    if is_users:
        words = [_OUTER, _BEGIN + _WATCH + _RUN + _END_OF_USER, token, str(seconds), *command]
    else:
        variables = [f"{name}={value}" for name, value in (SET_VARIABLES | dict(setting.variables)).items()]
        # `env` would read a program with `=` in its path as a variable.
        program = ["sh", "-c", 'exec "$@"', "csdctl", *command] if "=" in command[0] else command
        enter, place = ("", []) if setting.state is None else (_ENTER, [setting.state])
        inner = _BEGIN + enter + _WATCH + _FILTER + _END
        words = [_UMASK + _RAISE + _OUTER, inner, token, str(seconds), *place, *variables, *program]
    return WrappedCommand(tuple(command), token, _build_script(words, command[0]))


def _build_script(words: Sequence[str], program: str) -> bytes:
    """Return one line for `sh`, which runs the script `words[0]` with `words[1:]` as its parameters.

    Bytes that are not printable ASCII are octal numbers for `printf`: shells read lines in different ways.
    """
    statements, quoted = [], []
    for number, word in enumerate(words):
        try:
            content = word.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InputError(f"an argument of `{program}` is no text: {word!r}") from None
        if b"\0" in content:
            raise InputError(f"an argument of `{program}` contains a NUL byte: {word!r}")
        if len(content) > MAX_ARGUMENT_BYTES:
            problem = f"an argument of `{program}` is longer than {MAX_ARGUMENT_BYTES} bytes"
            raise InputError(problem, remedy="send the long part as standard input")
        if _PLAIN.fullmatch(word):
            quoted.append(shlex.quote(word))
            continue
        plain = {byte for byte in range(32, 127) if byte not in b"-%\\'"}
        escaped = "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in content)
        # The substitution drops newlines at the end, so another character ends it.
        name = f"csdctl_{number}"
        statements.append(f"{name}=$(printf '{escaped}_'); {name}=${{{name}%_}}; ")
        quoted.append(f'"${name}"')
    return f"{''.join(statements)}set -- {' '.join(quoted[1:])}; eval {quoted[0]}\n".encode()


def build_kill_command(group: int) -> WrappedCommand:
    """Return the command that kills process group `group`. It exits with 0 if all processes have ended."""
    if group <= 1:
        raise ValueError(f"not a process group of csdctl: {group}")
    return WrappedCommand(("kill",), "csdctl-kill", _build_script([_KILL, str(group)], "kill"))


class MarkedOutput:
    """The output of a command on one stream after its token. Its beginning or its end is kept."""

    MAX_PREAMBLE_BYTES = 1 << 16
    MAX_START_BYTES = 16 << 20  # more than start-up files print; the channel's window stops the rest

    def __init__(self, token: str, *, max_bytes: int, keep_end: bool = False) -> None:
        self.token = token
        self._token = token.encode()
        self._max_bytes = max_bytes
        self._keep_end = keep_end
        self._kept = bytearray()
        self._line_start = 0
        self.preamble = bytearray()
        self.num_before = 0
        self.has_started = False
        self.group = 0

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream. Return those written by the command."""
        if not self.has_started:
            start, end = self._find_marker(data)
            if not end:
                return b""
            self.has_started = True
            data = bytes(self.preamble[end:])
            del self.preamble[start:]
        if self._keep_end:
            self._kept += data
            if len(self._kept) > 2 * self._max_bytes:
                del self._kept[: -self._max_bytes]
        else:
            self._kept += data[: self._max_bytes - len(self._kept)]
        return data

    def _find_marker(self, data: bytes) -> tuple[int, int]:
        """Add `data` to the preamble. Return where the token and its line begin and end, or 0 and 0.

        A shell that traces commands (`set -x`) prints the token too, followed by other text. A line is
        searched once, when it is complete: a server may send it byte by byte.
        """
        searched = len(self.preamble)
        self.num_before += len(data)
        self.preamble += data
        while end := self.preamble.find(b"\n", searched) + 1:
            before, token, group = bytes(self.preamble[self._line_start : end]).rpartition(self._token)
            if token and _GROUP.fullmatch(group.strip()):
                self.group = int(group.strip() or 0)
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


def build_program_command(python: str, module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the argument list that runs csdctl/standalone/MODULE.py on its own. The source is packed."""
    source = (resources.files("csdctl") / "standalone" / f"{module}.py").read_bytes()
    packed = base64.b85encode(zlib.compress(source)).decode()
    program = f'import base64,zlib;exec(zlib.decompress(base64.b85decode("{packed}")))'
    return [python, "-I", "-S", "-c", program, *arguments]


def build_child_command(command: Sequence[str], parent: int) -> list[str]:
    """Return the argument list of a program on this host that ends with the starting thread of `parent`."""
    return build_program_command(sys.executable, "child", [str(parent), *command])


def build_worker_command(python: str, worker_path: str, arguments: Sequence[str]) -> list[str]:
    """Return the argument list that runs the worker's command `arguments[0]` from the file `worker_path`.

    The file of the store must have the SHA-256 of its name.
    """
    return [python, *PYTHON_FLAGS, "-c", _RUN_CHECKED, worker_path, *arguments]
