"""The program that starts a sandbox, stays outside of it, and ends with it.

It serves the seccomp supervisor until all processes in the sandbox have ended, daemons included. A line on
standard input, or its end, ends the sandbox: csdctl has no more use for it, or is gone.
"""

import contextlib
import ipaddress
import os
import select
import shutil
import signal
import site
import socket
import tempfile

from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.sandbox import (
    SOCKETS_VARIABLE,
    USER_VARIABLE,
    SandboxCheck,
    SandboxPolicy,
    SandboxRequest,
)
from csdctl.worker.sandbox.arrivals import why_open
from csdctl.worker.sandbox.files import (
    SYSTEM_PATHS,
    USER_ID,
    become_nobody,
    landlock_version,
    python_paths,
    restrict_files,
)
from csdctl.worker.sandbox.seccomp_supervisor import SeccompSupervisor
from csdctl.worker.sandbox.system_calls import (
    ARCHITECTURES,
    LIBC,
    MACHINE,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    end_all,
    install_filter,
)

CANNOT_START = 125
_KEPT, _KEPT_PREFIXES = (
    ("LANG", "TZ", "PATH", "LD_LIBRARY_PATH"),
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
        with contextlib.suppress(BaseException):
            LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            socket.send_fds(theirs, [b"F"], [install_filter()])
            socket.socket().close()
            os._exit(0)
        os._exit(1)
    theirs.close()
    listener = _receive_listener(ours)
    if listener >= 0:
        SeccompSupervisor(listener, "", (), ()).serve_one()
    has_worked = os.waitpid(child, 0)[1] == 0
    if listener < 0:
        return SandboxCheck("the kernel or a container refuses seccomp filters with notifications")
    if not has_worked:
        return SandboxCheck("a process may not watch its children (kernel.yama.ptrace_scope)")
    return SandboxCheck("", why_open([ipaddress.ip_network(peer) for peer in request.peers]))


def run_sandbox() -> int:
    """Run the sandbox whose policy is the next line of standard input; return the exit code of its command.

    Raises ProtocolError, and WorkerError when it cannot be entered.
    """
    policy = from_json(SandboxPolicy, _read_line())
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
        end_all()
        shutil.rmtree(scratch, ignore_errors=True)


def _read_line() -> str:
    """Return the next line of standard input, and read not a byte more."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise WorkerError("the sandbox has received no policy")
        line += byte
    return line.decode()


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
    """Return what the sandbox sees of this environment: no agent, no tokens, no directories of the user."""
    kept = {
        name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }
    own = {"HOME": scratch, "TMPDIR": scratch, "SHELL": "/bin/sh", "PYTHONDONTWRITEBYTECODE": "1"}
    if os.path.isdir(site.getusersitepackages()):
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
