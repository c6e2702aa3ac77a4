"""Lock a machine for one csdctl at a time.

Sent as source, so it uses the standard library only. The first line of input describes the csdctl that wants
the lock. The response is `mine`, and the lock is kept until the input ends, in whatever way that csdctl
exits; or `held`, with a description of the current holder.
"""

import fcntl
import json
import os
import sys


def main() -> None:
    """Take the lock or print its holder; runs in the session's home directory."""
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
    os.execvp("cat", ["cat"])  # waits with a tenth of the memory of Python


if __name__ == "__main__":
    main()
