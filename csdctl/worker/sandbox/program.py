"""The program that starts a sandbox and stays outside of it, and the restrictions of the sandbox.

The program runs the seccomp supervisor until all processes in the sandbox have ended, daemons included. A
line on standard input, or its end, ends the sandbox: csdctl does not need it any more, or has exited. In the
sandbox, Landlock admits few files, root becomes another user, and memory and open files are limited.
"""

import contextlib
import ctypes
import io
import os
import re
import resource
import select
import shutil
import signal
import site
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from typing import NoReturn

from csdctl.worker.process.errors import describe
from csdctl.worker.process.machine import list_interfaces
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.processes import LIBC, duplicate_descriptor, end_descendants, system_call
from csdctl.worker.protocol.sandbox import (
    FIRST_USER,
    SOCKETS_VARIABLE,
    USER_VARIABLE,
    SandboxCheck,
    SandboxPolicy,
)
from csdctl.worker.sandbox.seccomp_filter import ARCHITECTURES, MACHINE, install_filter
from csdctl.worker.sandbox.seccomp_supervisor import SeccompSupervisor

SYSTEM_PATHS = [
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/proc", "/sys"),
    *("/dev/urandom", "/dev/random", "/dev/zero"),
    *("/etc/hosts", "/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime"),
    *("/etc/nsswitch.conf", "/etc/host.conf", "/etc/resolv.conf"),
]
"""Paths that programs read. In /proc, Landlock hides memory, files and environment of other processes."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY, _REFER, _TRUNCATE = 1, 2, 4, 8, 1 << 13, 1 << 14
_CHANGE_DIRECTORY = 0b1011110110000
"""Remove and make files, directories, sockets, pipes and links in a directory; no devices."""
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
CHANGE = READ | _WRITE_FILE | _CHANGE_DIRECTORY | _REFER | _TRUNCATE
_FIRST_NETWORK, _NETWORK = 4, 0b11
"""`bind` and `connect` of TCP, since version 4 of Landlock: the supervisor, outside, is the only way."""
_FIRST_SCOPES, _SCOPES = 6, 0b11
"""Abstract Unix sockets and signals, since version 6. The supervisor also guards both, with any version."""
MAX_OPEN_FILES, MAX_FILE_BYTES = 256, 16 << 20
"""Limits of one process and of one file. MPI's largest file describes the machine: 1 MB for many cores."""
_KEPT_VARIABLES = ("TZ", "PATH", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONNOUSERSITE", "PYTHONUTF8")
_KEPT_PREFIXES = ("LC_", "OMPI_", "PRTE_", "PMIX_", "CSDCTL_")
"""Variables that the sandbox keeps of the environment that csdctl has built."""
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
_CAP_AMBIENT, _CAP_AMBIENT_RAISE, _DAC_READ_SEARCH = 47, 2, 2
_CAPABILITY_VERSION = 0x20080522
CANNOT_START = 125
"""Exit code of a sandbox that cannot be entered."""
_ALLOW_ROOT = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Where the kernel cannot confine, root stays root. MPI's daemon refuses to run as root without these."""
_NO_SUCH_USER = 2


def landlock_version() -> int:
    """Return the version of Landlock that the kernel supports, 0 for none."""
    with contextlib.suppress(OSError):
        return system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return 0


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow this process and its children to open only these files and directories. Raises OSError."""
    version = landlock_version()
    handled = (1 << 12 + min(version, 3)) - 1  # versions 2 and 3 added a right each
    attributes = struct.pack("=Q", handled)
    attributes += struct.pack("=Q", _NETWORK) if version >= _FIRST_NETWORK else b""
    attributes += struct.pack("=Q", _SCOPES) if version >= _FIRST_SCOPES else b""
    ruleset = system_call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for paths, rights in ((readable, READ), (writable, CHANGE)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _admit(ruleset, path, rights & handled)
    system_call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _admit(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _OF_A_FILE, place)
        arguments = ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)
        system_call(_ADD_RULE, *arguments)
    finally:
        os.close(place)


def limit_resources(memory_bytes: int) -> None:
    """Limit the resources of each process of the sandbox. If memory is short, the kernel ends these first."""
    for kind, most in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def become_user(user: int, readable: Iterable[str]) -> None:
    """Become a user without an account. Raises OSError.

    The user may search all directories if some of `readable` are not open to everybody.
    """
    needs_search = not all(map(_is_open_to_all, readable))
    if needs_search:
        LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if needs_search:
        # Effective, permitted and inheritable, each in two words.
        capabilities = struct.pack("=6I", *[1 << _DAC_READ_SEARCH] * 3, 0, 0, 0)
        if LIBC.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), capabilities):
            raise OSError(ctypes.get_errno(), "capset")
        LIBC.prctl(_CAP_AMBIENT, _CAP_AMBIENT_RAISE, _DAC_READ_SEARCH, 0, 0)


def _is_open_to_all(path: str) -> bool:
    """Return whether any user may enter the directories of `path`, if it exists."""
    path = os.path.realpath(path)
    if not os.path.exists(path):
        return True
    while path != "/":
        if os.path.isdir(path) and os.stat(path).st_mode & 0o5 != 0o5:
            return False
        path = os.path.dirname(path)
    return True


def python_paths() -> list[str]:
    """Return the directories of this Python, its environments and modules, without any that has a home."""
    executables = {sys.executable, os.path.realpath(sys.executable)}
    prefixes = {os.path.dirname(os.path.dirname(path)) for path in executables}
    prefixes |= {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    home = os.path.realpath(os.path.expanduser("~"))
    modules = [path for path in map(os.path.realpath, filter(None, sys.path)) if not home.startswith(path)]
    sites = (re.fullmatch(r"(.*)/lib/python[^/]*/site-packages", path) for path in modules)
    prefixes |= {site[1] for site in sites if site}
    parts = ("bin", "lib", "lib64", "etc", "share", "include", "pyvenv.cfg")
    return [*(os.path.join(prefix, part) for prefix in sorted(prefixes) for part in parts), *modules]


@cache
def check_sandbox() -> SandboxCheck:
    """Try whether this machine can run a sandbox. Return the result, and its network interfaces.

    The first call forks this process, which should be small and have one thread at that time.
    """
    return SandboxCheck(_find_obstacle(), tuple(list_interfaces()))


def _find_obstacle() -> str:
    if MACHINE not in ARCHITECTURES:
        return f"the system calls of {MACHINE} are not known"
    if not landlock_version():
        return "the kernel has no Landlock (Linux 5.13 or newer has it, if enabled)"
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        _try_sandbox(theirs)
    theirs.close()
    try:
        listener = _take_listener(child, ours)
    except OSError:
        why = "kernel.yama.ptrace_scope, or a container without CAP_SYS_PTRACE"
        return f"a process may not act on sockets of its children ({why})"
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == _NO_SUCH_USER:
        return f"this container has no user {FIRST_USER}; run csdctl as an ordinary user"
    if listener < 0:
        return "the kernel or a container refuses seccomp filters with notifications"
    os.close(listener)
    return ""


def _try_sandbox(report: socket.socket) -> NoReturn:
    """Become another user, and hand over a filter's descriptor. Runs in a child process."""
    code = _NO_SUCH_USER
    with contextlib.suppress(BaseException):
        if os.getuid() == 0:
            become_user(FIRST_USER, [])
        code = 1
        LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _hand_over_filter(report)
    os._exit(code)


def _hand_over_filter(report: socket.socket) -> None:
    """Install the filter. Return when the other process has its descriptor. Raises OSError."""
    os.write(report.fileno(), str(install_filter()).encode())
    if not os.read(report.fileno(), 1):
        raise OSError("the seccomp supervisor cannot act on this process")


def _take_listener(child: int, connection: socket.socket) -> int:
    """Return the descriptor of the filter that `child` installs, -1 for none. Raises OSError."""
    with connection, contextlib.ExitStack() as stack:
        if not (number := connection.recv(16)):
            return -1
        pidfd = os.pidfd_open(child)
        stack.callback(os.close, pidfd)
        listener = duplicate_descriptor(pidfd, int(number))
        connection.sendall(b"T")
        return listener


def run_sandbox() -> int:
    """Run the sandbox whose policy is the next line of input. Return its exit code. Raises ProtocolError."""
    # Without a buffer, not a byte more than the line is read.
    policy = from_json(SandboxPolicy, io.FileIO(0, closefd=False).readline().decode())
    LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    scratch = tempfile.mkdtemp(prefix=f"csdctl-mpi-{os.getpid()}-")
    try:
        _fill(scratch, policy)
        child, listener = _start(policy, scratch)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(child, number))
        if listener >= 0:
            SeccompSupervisor(listener, policy.key, policy.peers, policy.sockets).start()
        return _await_end(woken, child)
    finally:
        end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)


def _fill(scratch: str, policy: SandboxPolicy) -> None:
    for path in policy.files:
        place = os.path.join(scratch, path)
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        shutil.copyfile(path, place)
    for name, text in policy.scripts.items():
        with open(os.path.join(scratch, name), "w") as file:
            file.write(text)
    if os.getuid() == 0 and policy.is_confined:
        for directory, _, names in os.walk(scratch):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                os.chown(path, policy.user, policy.user, follow_symlinks=False)


def _start(policy: SandboxPolicy, scratch: str) -> tuple[int, int]:
    environment = _build_environment(scratch) | {SOCKETS_VARIABLE: " ".join(policy.sockets)}
    if not any(":" in peer for peer in policy.peers):
        # With the other addresses of an interface, PRRTE does not find its IPv4 address.
        environment["PMIX_MCA_pif"] = "posix_ipv4"
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            _enter(policy, scratch, theirs)
            os.execve(policy.command[0], policy.command, environment)
        except BaseException as error:
            os.write(2, f"the sandbox cannot be entered: {describe(error)}\n".encode(errors="replace"))
        os._exit(CANNOT_START)
    theirs.close()
    return child, _take_listener(child, ours)


def _enter(policy: SandboxPolicy, scratch: str, report: socket.socket) -> None:
    os.setpgid(0, 0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir(scratch)
    if policy.is_confined:
        readable = [*SYSTEM_PATHS, *python_paths(), *policy.programs]
        limit_resources(policy.memory_bytes)
        if os.getuid() == 0:
            become_user(policy.user, readable)
        LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        restrict_files(readable, [scratch, os.devnull])
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # becoming another user would reset it
    if policy.is_confined:
        _hand_over_filter(report)


def _build_environment(scratch: str) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)
    }
    environment |= {"HOME": scratch, "TMPDIR": scratch, "SHELL": "/bin/sh", "PYTHONDONTWRITEBYTECODE": "1"}
    # Errors of the firmware do no harm, and a link needs no threads to add.
    environment |= {"HWLOC_HIDE_ERRORS": "2", "OPENBLAS_NUM_THREADS": "1"}
    if site.ENABLE_USER_SITE:
        environment["PYTHONUSERBASE"] = site.getuserbase()
    return environment | _ALLOW_ROOT | {USER_VARIABLE: str(os.getuid())}


def _await_end(woken: int, child: int) -> int:
    """Wait until all processes have ended, or standard input is no longer quiet. Return the exit code."""
    code = CANNOT_START
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready:
            return code
        os.read(woken, 4096)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return code if code >= 0 else 128 - code
