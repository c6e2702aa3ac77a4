"""What mpirun runs in place of ssh: it asks csdctl, over a Unix socket, to start a daemon on a node.

mpirun's sandbox holds no keys: csdctl starts the daemon over its own connection.
"""

import socket
import sys
from collections.abc import Sequence

from csdctl.worker.protocol.json_codec import from_json, to_json
from csdctl.worker.protocol.sandbox import DaemonOutput, DaemonRequest

NO_ANSWER = 255
"""As ssh exits."""


def request_daemon(address: str, node: str, command: Sequence[str]) -> int:
    """Pass on the request, print what the daemon prints, and return its exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect("\0" + address)
        connection.sendall(to_json(DaemonRequest(node, " ".join(command))).encode() + b"\n")
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                output = from_json(DaemonOutput, line)
                if output.exit_code is not None:
                    return output.exit_code
                print(output.line, file=sys.stderr, flush=True)
    return NO_ANSWER
