"""Holds a machine for one csdctl at a time. Runs alone, from the text of this file: standard library only.

The first line of input says who wants it. Answers `mine` and waits until its input ends, which it does
however that csdctl ends; or answers `held` and who has it.
"""

import fcntl
import json
import os
import sys


def main() -> None:
    """Take the lock or tell who has it; the directory is the session's own."""
    os.makedirs(".csdctl", exist_ok=True)
    lock = os.open(".csdctl/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    holder = json.loads(sys.stdin.readline())
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held " + os.read(lock, 4096).decode(errors="replace"), flush=True)
        return
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({**holder, "holding_pid": os.getpid()}).encode(), 0)
    print("mine", flush=True)
    os.set_inheritable(lock, True)
    os.execvp("cat", ["cat"])  # waits in a tenth of the memory of a Python


if __name__ == "__main__":
    main()
