"""Opens doors on this machine and knocks at those of the others; one conversation, a line of JSON each.

Sent as source and run by `PYTHON -I -S -c`, so it needs the standard library only.

    asked     {"name": …, "token": …, "address": …, "is_host": …}
    answers   {"ports": [1024, 40123]}     or   {"error": …}
    asked     {"doors": [[NAME, ADDRESS, PORT], …], "deadline_s": …}
    answers   {"knocks": [[NAME, PORT, ""], [NAME, PORT, "timed out"], …]}

Doors stay open until standard input ends. Ranks of Open MPI listen at the first free port from 1024 on,
mpirun itself at one that the system chooses: so do the doors.
"""

import errno
import json
import socket
import sys
import threading
from collections.abc import Iterable

FIRST_RANK_PORT = 1024
LAST_RANK_PORT = 65535
MAX_GREETING_BYTES = 256


def open_door(address: str, ports: Iterable[int]) -> socket.socket:
    """Listen at the first of `ports` that is free; raises OSError."""
    refused = OSError("no port is free")
    for port in ports:
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            door.bind((address, port))
            door.listen(128)
            return door
        except OSError as error:
            door.close()
            refused = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    raise refused


def answer(door: socket.socket, greeting: bytes) -> None:
    """Tell everybody who comes in who is here."""
    while True:
        visitor, _ = door.accept()
        try:
            visitor.settimeout(5)
            visitor.sendall(greeting)
        except OSError:
            pass
        finally:
            visitor.close()


def knock(name: str, address: str, port: int, token: str, deadline_s: float) -> str:
    """'' when `name` answers there, else why not."""
    try:
        visit = socket.create_connection((address, port), timeout=deadline_s)
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    try:
        heard = b""
        while not heard.endswith(b"\n") and len(heard) < MAX_GREETING_BYTES:
            piece = visit.recv(MAX_GREETING_BYTES)
            if not piece:
                break
            heard += piece
    except OSError:
        return "connected, but nothing was answered"
    finally:
        visit.close()
    told, _, who = heard.decode("utf-8", "replace").strip().partition(" ")
    if told != token:
        return "something else answers there"
    return "" if who == name else f"{who} answers there"


def knock_at_all(
    doors: list[tuple[str, str, int]], token: str, deadline_s: float
) -> list[tuple[str, int, str]]:
    """Knock at all doors at once; returns [name, port, why not] for each."""
    reasons = ["timed out"] * len(doors)

    def knock_at(number: int) -> None:
        name, address, port = doors[number]
        reasons[number] = knock(name, address, port, token, deadline_s)

    threads = [threading.Thread(target=knock_at, args=(number,), daemon=True) for number in range(len(doors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * deadline_s + 1)
    return [(name, port, why) for (name, _, port), why in zip(doors, reasons, strict=True)]


def main() -> None:
    """Open, knock, and stay until nobody asks any more."""
    asked = json.loads(sys.stdin.readline())
    try:
        doors = [open_door(asked["address"], range(FIRST_RANK_PORT, LAST_RANK_PORT))]
        if asked["is_host"]:
            doors.append(open_door(asked["address"], [0]))
    except OSError as error:
        print(json.dumps({"error": f"no port can be opened at {asked['address']}: {error.strerror}"}))
        return
    greeting = f"{asked['token']} {asked['name']}\n".encode()
    for door in doors:
        threading.Thread(target=answer, args=(door, greeting), daemon=True).start()
    print(json.dumps({"ports": [door.getsockname()[1] for door in doors]}))
    sys.stdout.flush()
    line = sys.stdin.readline()
    if line:
        wanted = json.loads(line)
        print(json.dumps({"knocks": knock_at_all(wanted["doors"], asked["token"], wanted["deadline_s"])}))
        sys.stdout.flush()
        sys.stdin.readline()


if __name__ == "__main__":
    main()
