"""The program that starts a sandbox, stays outside of it, and ends with it; and how the sandbox is entered.

It serves the seccomp supervisor until all processes in the sandbox have ended, daemons included. A line on
standard input, or its end, ends the sandbox: csdctl has no more use for it, or is gone. In the sandbox,
Landlock admits few files, and root becomes another user.
"""

import contextlib
import ctypes
import io
import ipaddress
import os
import re
import select
import shutil
import signal
import site
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable
from typing import NoReturn

from csdctl.worker.process.errors import describe
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.processes import LIBC, end_descendants, system_call
from csdctl.worker.protocol.sandbox import (
    SOCKETS_VARIABLE,
    USER_VARIABLE,
    SandboxCheck,
    SandboxPolicy,
    SandboxRequest,
)
from csdctl.worker.sandbox.seccomp_supervisor import (
    ARCHITECTURES,
    MACHINE,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    SeccompSupervisor,
    install_filter,
    why_open,
)

USER_ID = 1_907_000_000
"""The user that root becomes: outside of all ranges that systems give to accounts and containers."""
SYSTEM_PATHS = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/proc",
    "/sys",
    "/dev/urandom",
    "/dev/random",
    "/dev/zero",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/resolv.conf",
]
"""Read by every program. In /proc, Landlock hides the memory, files and environment of other processes."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY, _REFER, _TRUNCATE = 1, 2, 4, 8, 1 << 13, 1 << 14
_CHANGE_DIRECTORY = 0b1011110110000
"""Remove and make files, directories, sockets, pipes and links in a directory; no devices."""
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
CHANGE = READ | _WRITE_FILE | _CHANGE_DIRECTORY | _REFER | _TRUNCATE
_FIRST_SCOPES = 6
_SCOPES = 0b11
"""Abstract Unix sockets and signals, since version 6 of Landlock; the supervisor guards both anywhere."""
_CAP_AMBIENT, _CAP_AMBIENT_RAISE, _DAC_READ_SEARCH = 47, 2, 2
_CAPABILITY_VERSION = 0x20080522


def landlock_version() -> int:
    """Return the version of Landlock that the kernel supports, 0 for none."""
    with contextlib.suppress(OSError):
        return system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return 0


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Let this process and its children open nothing but these files and directories; raises OSError."""
    version = landlock_version()
    handled = (1 << 12 + min(version, 3)) - 1  # versions 2 and 3 added a right each
    attributes = struct.pack("=Q", handled)
    if version >= _FIRST_SCOPES:
        attributes = struct.pack("=QQQ", handled, 0, _SCOPES)
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


def become_nobody(readable: Iterable[str]) -> None:
    """Become a user without an account; raises OSError.

    Where other users cannot read some of `readable`, such as a Python in root's home, this user may read
    everything: Landlock alone then decides what.
    """
    needs_search = not all(map(_is_open_to_all, readable))
    if needs_search:
        LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(USER_ID, USER_ID, USER_ID)
    os.setresuid(USER_ID, USER_ID, USER_ID)
    if needs_search:
        capability = 1 << _DAC_READ_SEARCH
        header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
        if LIBC.capset(header, struct.pack("=6I", capability, capability, capability, 0, 0, 0)):
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
    """Return the parts of this Python, of environments whose packages it uses, and directories of modules.

    Never a whole prefix, nor a directory that contains a home: somebody's files may be there.
    """
    executables = {sys.executable, os.path.realpath(sys.executable)}
    prefixes = {os.path.dirname(os.path.dirname(path)) for path in executables}
    prefixes |= {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    home = os.path.realpath(os.path.expanduser("~"))
    modules = [path for path in map(os.path.realpath, filter(None, sys.path)) if not home.startswith(path)]
    sites = (re.fullmatch(r"(.*)/lib/python[^/]*/site-packages", path) for path in modules)
    prefixes |= {site[1] for site in sites if site}
    parts = ("bin", "lib", "lib64", "etc", "share", "include", "pyvenv.cfg")
    return [*(os.path.join(prefix, part) for prefix in sorted(prefixes) for part in parts), *modules]


CANNOT_START = 125
_KEPT, _KEPT_PREFIXES = (
    ("TZ", "PATH", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONNOUSERSITE", "PYTHONUTF8"),
    ("LC_", "OMPI_", "PRTE_", "PMIX_", "CSDCTL_"),
)
# Where the kernel cannot confine, root stays root, and MPI's daemon refuses to run as root without these.
_ALLOW_ROOT = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def check_sandbox(request: SandboxRequest) -> SandboxCheck:
    """Return whether this machine can run a sandbox, and close its ports to all but its peers, by trying."""
    if MACHINE not in ARCHITECTURES:
        return SandboxCheck(f"the system calls of {MACHINE} are not known")
    if not landlock_version():
        return SandboxCheck("the kernel has no Landlock (Linux 5.13 or newer has it, if enabled)")
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        _try_sandbox(theirs)
    theirs.close()
    listener = _receive_listener(ours)
    code = os.waitstatus_to_exitcode(_serve_until_end(child, listener))
    if code == _NO_SUCH_USER:
        return SandboxCheck(f"this container has no user {USER_ID}; run csdctl as an ordinary user")
    if listener < 0:
        return SandboxCheck("the kernel or a container refuses seccomp filters with notifications")
    if code:
        why = "kernel.yama.ptrace_scope, or a container without CAP_SYS_PTRACE"
        return SandboxCheck(f"a process may not act on sockets of its children ({why})")
    return SandboxCheck("", why_open([ipaddress.ip_network(peer) for peer in request.peers]))


_NO_SUCH_USER = 2


def _try_sandbox(report: socket.socket) -> NoReturn:
    """Do what a sandbox does, in a child: become another user, and bind a socket that the parent acts on."""
    code = _NO_SUCH_USER
    with contextlib.suppress(BaseException):
        if os.getuid() == 0:
            become_nobody([])
        code = 1
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        socket.send_fds(report, [b"F"], [install_filter()])
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
        code = 0
    os._exit(code)


def _serve_until_end(child: int, listener: int) -> int:
    """Answer the notifications of `child` until it ends; return its wait status."""
    supervisor, poll = SeccompSupervisor(listener, "", (), ()), select.poll()
    if listener >= 0:
        poll.register(listener, select.POLLIN)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if any(event & select.POLLIN for _, event in poll.poll(10)):
            supervisor.serve_one()
    return ended[1]


def run_sandbox() -> int:
    """Run the sandbox whose policy is the next line of standard input; return the exit code of its command.

    Raises ProtocolError.
    """
    # Without a buffer, not a byte more than the line is read.
    policy = from_json(SandboxPolicy, io.FileIO(0, closefd=False).readline().decode())
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
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
        return _serve(
            SeccompSupervisor(listener, policy.key, policy.peers, policy.sockets), listener, woken, child
        )
    finally:
        end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)


def _fill(scratch: str, policy: SandboxPolicy) -> None:
    """Write the sandbox's files, for the user that it runs as."""
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
                os.chown(path, USER_ID, USER_ID, follow_symlinks=False)


def _start(policy: SandboxPolicy, scratch: str) -> tuple[int, int]:
    """Start the command; return its process, and the descriptor of the filter's notifications or -1."""
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
    return child, _receive_listener(ours)


def _enter(policy: SandboxPolicy, scratch: str, report: socket.socket) -> None:
    """Give up everything that the policy does not name, for good; raises OSError."""
    os.setpgid(0, 0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir(scratch)
    if policy.is_confined:
        readable = [*SYSTEM_PATHS, *python_paths(), *policy.programs]
        if os.getuid() == 0:
            become_nobody(readable)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        restrict_files(readable, [scratch, os.devnull])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # becoming another user would reset it
    if policy.is_confined:
        socket.send_fds(report, [b"F"], [install_filter()])


def _receive_listener(connection: socket.socket) -> int:
    with connection:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return descriptors[0] if descriptors else -1


def _build_environment(scratch: str) -> dict[str, str]:
    """Return what the sandbox sees of the environment that csdctl has built: no directories of a user."""
    kept = {
        name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }
    own = {"HOME": scratch, "TMPDIR": scratch, "SHELL": "/bin/sh", "PYTHONDONTWRITEBYTECODE": "1"}
    # Errors of the firmware do no harm, and a link needs no threads to add.
    own |= {"HWLOC_HIDE_ERRORS": "2", "OPENBLAS_NUM_THREADS": "1"}
    if site.ENABLE_USER_SITE:
        own["PYTHONUSERBASE"] = site.getuserbase()
    return {**kept, **own, **_ALLOW_ROOT, USER_VARIABLE: str(os.getuid())}


def _serve(supervisor: SeccompSupervisor, listener: int, woken: int, child: int) -> int:
    """Answer notifications until all processes have ended, or standard input is no longer quiet."""
    code = CANNOT_START
    poll = select.poll()
    for descriptor in (0, woken, *([listener] if listener >= 0 else [])):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, event in poll.poll():
            if descriptor == 0:
                return code
            if descriptor == woken:
                os.read(woken, 4096)
            elif event & select.POLLIN:
                supervisor.serve_one()
            else:
                poll.unregister(listener)  # all processes with the filter have ended
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return code if code >= 0 else 128 - code
