"""A server with TensorFlow loaded that forks ranks and probe sessions, and stays for a settable time.

TensorFlow starts no thread before its first operation, so a process may be forked until then. The server
holds no data of a job: it has imported modules only (docs/decisions/0049).

A command sends its arguments, environment and standard streams to the server's socket in the session's home
directory, and waits. It acts for the forked process: that one ends as soon as the command does, and the
command ends with its exit code. A machine has one server; another version or other settings replace it.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen

from csdctl.worker.process.output import end_without_reader
from csdctl.worker.protocol.processes import is_of_same_user
from csdctl.worker.protocol.run_spec import Runtime

SOCKET = Path(".csdctl/fork-server")
COMMAND = "fork-server"
_READ_WHEN_LOADED = ("TF_", "XLA_", "KERAS_", "CUDA_", "OMP_", "OPENBLAS_", "LD_", "PYTHON", "LC_", "LANG")
"""Prefixes of variables that take effect at an import: a server has those of its first command."""
_STREAMS = (0, 1, 2)
_FIRST_IDLE_S, _LOAD_DEADLINE_S, _REQUEST_DEADLINE_S, _TICK_S = 60.0, 200.0, 10.0, 1.0
_STATUS = struct.Struct("=i")


def run_in_fork(runtime: Runtime, idle_s: float) -> None:
    """Let a forked process run this process's command, then exit as it did.

    Return where the command runs in this process: in the forked one, with `idle_s` 0, and when no server
    can be started. A server stays `idle_s` seconds after its last process.
    """
    if idle_s <= 0 or "tensorflow" in sys.modules:
        return
    program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    read = sorted(pair for pair in os.environ.items() if pair[0].startswith(_READ_WHEN_LOADED))
    # pip changes the directory of packages in which it installs or upgrades one.
    packages = [os.stat(at).st_mtime for at in sys.path if at.endswith("-packages") and os.path.isdir(at)]
    form = json.dumps([program, sys.executable, runtime.threads, runtime.onednn, read, packages])
    key = hashlib.sha256(form.encode()).hexdigest()
    request = json.dumps([key, idle_s, sys.argv, dict(os.environ)]).encode() + b"\n"
    options = ("--key", key, "--threads", str(runtime.threads), "--onednn", str(int(runtime.onednn)))
    for connect in (_connect, lambda: _start([*program, COMMAND, *options])):
        with contextlib.suppress(OSError), connect() as connection:
            socket.send_fds(connection, [b"\n"], _STREAMS)
            connection.sendall(request)
            if connection.recv(1):
                connection.settimeout(None)
                _exit_like(connection.recv(_STATUS.size))


def _exit_like(status: bytes) -> None:
    """End as the process with this wait status; without one, its parent was killed."""
    code = os.waitstatus_to_exitcode(*_STATUS.unpack(status)) if status else -signal.SIGKILL
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _connect() -> socket.socket:
    """Connect to this machine's server; raises OSError without one of this user."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(SOCKET))
    if not is_of_same_user(connection):
        raise PermissionError
    connection.settimeout(_LOAD_DEADLINE_S)
    return connection


def _start(command: list[str]) -> socket.socket:
    """Start a server in place of an earlier one, and connect to it. It answers once it has loaded."""
    aside = SOCKET.with_name(f"{SOCKET.name}.{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(aside))  # for this user alone, by the umask
        server.listen()
        os.replace(aside, SOCKET)
        # By the marker, standalone/leftovers.py finds it.
        command = [*command, "--marker", f"csdctl-run={COMMAND}"]
        if (child := os.fork()) == 0:  # whoever ends this command with its children leaves the server
            with contextlib.suppress(OSError):
                Popen(command, stdin=server.fileno(), stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
            os._exit(0)
        os.waitpid(child, 0)
        return _connect()


def serve(key: str, place: int) -> bool:
    """Fork for every request with `key`; return True in the forked process, to run the command of sys.argv.

    Standard input is the listening socket, and `place` its inode. Return False in the server when no process
    has run for as long as the latest request allows, and when another server has taken its place.
    """
    idle_s, used_s = _FIRST_IDLE_S, time.monotonic()
    with socket.socket(fileno=os.dup(0)) as listener:
        listener.settimeout(_TICK_S)
        while time.monotonic() - used_s < idle_s and SOCKET.exists() and SOCKET.stat().st_ino == place:
            used_s = time.monotonic() if _has_children() else used_s
            streams: list[int] = []
            with contextlib.suppress(OSError, ValueError), listener.accept()[0] as connection:
                connection.settimeout(_REQUEST_DEADLINE_S)
                _, streams, _, _ = socket.recv_fds(connection, 1, len(_STREAMS))
                with connection.makefile("rb") as lines:
                    wanted, allowed_s, *command = json.loads(lines.readline())
                if wanted == key and is_of_same_user(connection):
                    idle_s, used_s = allowed_s, time.monotonic()
                    if os.fork() == 0:
                        _become(connection, streams, *command)
                        return True
            for stream in streams:
                os.close(stream)
    return False


def _has_children() -> bool:
    """Reap processes that have ended; return whether others run."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _become(
    connection: socket.socket, streams: list[int], arguments: list[str], environment: dict[str, str]
) -> None:
    """Fork again; return in the child, with what the command has sent.

    The parent sends how the child ends; it kills it, and all that it has started, when the command ends.
    """
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the first command may have ignored it
        os.setsid()
        child = os.fork()
        if child == 0:
            for number, stream in zip(_STREAMS, streams, strict=True):
                os.dup2(stream, number)
                os.close(stream)
            sys.argv[:] = arguments
            os.environ.clear()
            os.environ.update(environment)
            return
        os.closerange(0, connection.fileno())
        os.closerange(connection.fileno() + 1, 1 << 16)
        end_without_reader(connection.fileno(), partial(os.killpg, 0, signal.SIGKILL))
        connection.settimeout(None)
        connection.send(b"\n")
        connection.send(_STATUS.pack(os.waitpid(child, 0)[1]))
    os.killpg(0, signal.SIGKILL)
