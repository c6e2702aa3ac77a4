"""Lock a machine for one csdctl at a time.

Sent as source, so it uses the standard library only. The first line of input describes the csdctl that wants
the lock. The response is `held`, with a description of the current holder, or `locked`, with the other
machines of the home. The lock is then kept until the input ends, however that csdctl exits.
"""

import contextlib
import fcntl
import json
import os
import stat
import sys

STATE = ".csdctl"
LOCK = STATE + "/lock"


def main() -> None:
    """Take the lock or print its holder. Runs in the session's directory."""
    os.umask(0o077)
    make_private(STATE)
    if os.path.lexists(LOCK):
        status = os.lstat(LOCK)
        if status.st_uid != os.geteuid():
            refuse(f"{os.path.abspath(LOCK)} belongs to another user")
        if not stat.S_ISREG(status.st_mode):
            refuse(f"{os.path.abspath(LOCK)} is not a regular file")
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    os.fchmod(lock, 0o600)
    holder = json.loads(sys.stdin.readline())
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = {}
        with contextlib.suppress(ValueError, TypeError):  # its owner is still writing it
            holder = dict(json.loads(os.read(lock, 4096)))
        print("@csdctl-held " + json.dumps({"holder": holder}), flush=True)
        return
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({**holder, "holding_pid": os.getpid()}).encode(), 0)
    place = os.getcwd()  # …/machines/THIS
    is_of_machine = os.path.basename(os.path.dirname(place)) == "machines"
    siblings = sorted(set(os.listdir("..")) - {os.path.basename(place)}) if is_of_machine else []
    print("@csdctl-locked " + json.dumps({"siblings": siblings[:100]}), flush=True)
    os.set_inheritable(lock, True)
    os.execvp("cat", ["cat"])  # waits with a tenth of the memory of Python


def refuse(problem: str, remedy: str = "remove it") -> None:
    """Print why there is no lock, and exit."""
    print("@csdctl-error " + json.dumps({"message": problem, "remedy": remedy}), flush=True)
    sys.exit(1)


def make_private(directory: str) -> None:
    """Create `directory`, or take other users' permissions. Exit if another user can change what is in it."""
    parent = os.getcwd()
    while parent != "/":
        mode = os.stat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            refuse(f"{parent} can be changed by every user", f"chmod o-w {parent}")
        parent = os.path.dirname(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    if {os.lstat(directory).st_uid, os.stat(directory).st_uid} != {os.geteuid()}:
        refuse(f"{os.path.abspath(directory)} belongs to another user")
    if os.stat(directory).st_mode & 0o077:
        os.chmod(directory, 0o700)


if __name__ == "__main__":
    main()
