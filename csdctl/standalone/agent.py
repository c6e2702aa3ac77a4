"""The program that mpirun runs in place of ssh: it asks csdctl, by a Unix socket, for a daemon on a node.

mpirun's sandbox holds no keys; csdctl starts the daemon over its own connection. Every node has one of these
while the run lasts, so it imports next to nothing. Arguments: the name of an abstract Unix address, the node,
and the command as ssh takes it. The request is the node and the command, separated by a NUL, up to the end of
the stream; the response are lines: `O TEXT` for output, `X CODE` for the end.
"""

import socket
import sys

NO_RESPONSE = 255
"""As ssh exits."""


def main() -> int:
    """Pass on the request, print what the daemon prints, and return its exit code."""
    address, node, *command = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + address)
    connection.sendall(f"{node}\0{' '.join(command)}".encode(errors="surrogateescape"))
    connection.shutdown(socket.SHUT_WR)
    for line in connection.makefile("r", encoding="utf-8", errors="replace"):
        kind, text = line[0], line[2:-1]
        if kind == "X":
            return int(text)
        print(text, file=sys.stderr, flush=True)
    return NO_RESPONSE


if __name__ == "__main__":
    sys.exit(main())
