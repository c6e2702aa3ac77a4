"""Lock a machine for one csdctl at a time.

Sent as source, so it uses the standard library only. The first line of input describes the csdctl that wants
the lock. The response is `mine`, and the lock is kept until the input ends, in whatever way that csdctl
exits; or `held`, with a description of the current holder.

An argument is the id of the process that holds the lock for a csdctl that is gone: it is ended first, if it
really has the lock's file open.
"""

import contextlib
import fcntl
import json
import os
import signal
import stat
import sys
import time

STATE = ".csdctl"
LOCK = STATE + "/lock"
RELEASE_S = 10.0
"""How long the kernel may take to release the lock of a process that was ended."""


def main() -> None:
    """Take the lock or print its holder; runs in the session's home directory."""
    os.umask(0o077)
    make_private(STATE)
    lock = open_lock()
    holder = json.loads(sys.stdin.readline())
    is_ending = len(sys.argv) > 1 and end_holder(int(sys.argv[1]), lock)
    if not take(lock, RELEASE_S if is_ending else 0.0):
        text = os.read(lock, 4096).decode(errors="replace")
        print("@csdctl-held " + json.dumps({"holder": text}), flush=True)
        return
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({**holder, "holding_pid": os.getpid()}).encode(), 0)
    print("@csdctl-mine {}", flush=True)
    os.set_inheritable(lock, True)
    os.execvp("cat", ["cat"])  # waits with a tenth of the memory of Python


def make_private(directory: str) -> None:
    """Create `directory`, or narrow it; exit if another user can change what is in it."""
    around = os.stat(".").st_mode
    if around & stat.S_IWOTH and not around & stat.S_ISVTX:
        sys.exit(f"{os.getcwd()} can be changed by every user: chmod o-w it")
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    if {os.lstat(directory).st_uid, os.stat(directory).st_uid} != {os.geteuid()}:
        sys.exit(f"{os.path.abspath(directory)} belongs to another user: remove it")
    if os.stat(directory).st_mode & 0o077:
        os.chmod(directory, 0o700)


def open_lock() -> int:
    """Return a descriptor of the lock's file; exit if it is another user's."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(LOCK, flags, 0o600)
    found = os.fstat(lock)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        sys.exit(f"{os.path.abspath(LOCK)} belongs to another user: remove it")
    os.fchmod(lock, 0o600)
    return lock


def take(lock: int, wait_s: float) -> bool:
    """Return whether the lock could be taken within `wait_s`."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end_s:
                return False
        time.sleep(0.02)


def end_holder(pid: int, lock: int) -> bool:
    """End process `pid` if it has the lock's file open; return whether it had."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if pid > 1 and os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), os.fstat(lock)):
                    os.kill(pid, signal.SIGKILL)
                    return True
    return False


if __name__ == "__main__":
    main()
