"""The end of a process whose output nobody will read: csdctl is gone, or its connection is.

Standard input says as much only to who reads it, and writing fails only for who has something to say. A
process that computes for minutes does neither, and sshd leaves it running.
"""

import os
import select
import threading


def end_without_reader() -> None:
    """End this process, from now on, as soon as nobody can read its standard output any more.

    A pipe or socket whose other end was closed is always reported, whatever is waited for; a file never is.
    """
    output = os.dup(1)  # code of the user, and libraries, may redirect 1

    def wait() -> None:
        poll = select.poll()
        poll.register(output, 0)
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait, name="reader", daemon=True).start()
