"""Listen on this machine and connect to the listeners of the other machines.

Sent as source and run by `PYTHON -I -S -c`, so it uses the standard library only. A request is a line of
JSON, a response the frame `@csdctl-result JSON`, or `@csdctl-error JSON`:

    request   {"name": …, "token": …, "address": …, "is_host": …, "num_bytes": …}
    response  {"ports": [1024, 40123]}
    request   {"listeners": [[NAME, ADDRESS, PORT], …], "deadline_s": …}
    response  {"attempts": [[NAME, PORT, ""], [NAME, PORT, "timed out"], …]}

Listeners stay open until standard input ends. Open MPI's ranks listen on the first free port from 1024 up,
mpirun itself on a port that the system chooses. The listeners here do the same.
"""

import contextlib
import errno
import json
import socket
import sys
import threading
from collections.abc import Iterable


def open_listener(address: str, ports: Iterable[int]) -> socket.socket:
    """Listen on the first free port of `ports`; raises OSError."""
    failure = OSError("no port is free")
    for port in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((address, port))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            failure = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    raise failure


def serve(listener: socket.socket, greeting: bytes) -> None:
    """Send `greeting` to every client."""
    while True:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.settimeout(5)
            client.sendall(greeting)


def connect(name: str, address: str, port: int, token: str, deadline_s: float) -> str:
    """Connect to the listener of `name`; return '' on success, else the reason."""
    try:
        connection = socket.create_connection((address, port), timeout=deadline_s)
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    try:
        with connection, connection.makefile("rb") as stream:
            received = stream.readline(1 << 17)
    except OSError:
        return "connected, but received no response"
    received_token, _, server = received.decode("utf-8", "replace").strip().partition(" ")
    if received_token != token:
        return "another program listens there"
    return "" if server == name else f"{server} listens there"


def connect_to_all(
    listeners: list[tuple[str, str, int]], token: str, deadline_s: float
) -> list[tuple[str, int, str]]:
    """Connect to all listeners in parallel; return [name, port, reason of failure or ''] for each."""
    reasons = ["timed out"] * len(listeners)

    def connect_to(number: int) -> None:
        name, address, port = listeners[number]
        reasons[number] = connect(name, address, port, token, deadline_s)

    threads = [threading.Thread(target=connect_to, args=(i,), daemon=True) for i in range(len(listeners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * deadline_s + 1)
    return [(name, port, reason) for (name, _, port), reason in zip(listeners, reasons, strict=True)]


def respond(kind: str, **content: object) -> None:
    """Print a frame."""
    print("@csdctl-" + kind + " " + json.dumps(content), flush=True)


def main() -> None:
    """Listen, connect to the other machines when requested, and exit when standard input ends."""
    request = json.loads(sys.stdin.readline())
    try:
        listeners = [open_listener(request["address"], range(1024, 65535))]
        if request["is_host"]:
            listeners.append(open_listener(request["address"], [0]))
    except OSError as error:
        message = f"no port can be opened at {request['address']}: {error.strerror}"
        respond("error", message=message, remedy="check which ports are in use")
        return
    greeting = f"{request['token']} {request['name']}".ljust(request["num_bytes"] - 1).encode() + b"\n"
    for listener in listeners:
        threading.Thread(target=serve, args=(listener, greeting), daemon=True).start()
    respond("result", ports=[listener.getsockname()[1] for listener in listeners])
    line = sys.stdin.readline()
    if line:
        targets = json.loads(line)
        attempts = connect_to_all(targets["listeners"], request["token"], targets["deadline_s"])
        respond("result", attempts=attempts)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
