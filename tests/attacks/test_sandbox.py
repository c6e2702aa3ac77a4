"""A program in the sandbox reaches only its own files, processes and sockets; neighbours do not get in."""

import contextlib
import functools
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from csdctl.shipping.store import pack_worker
from csdctl.worker.protocol.sandbox import user_of_link
from csdctl.worker.sandbox.seccomp_filter import MACHINE
from csdctl.worker.sandbox.seccomp_supervisor import NUM_THREADS
from tests.needs import SYSTEM_PYTHON, require
from tests.patience import eventually

pytestmark = pytest.mark.first(1)

ORDINARY, RANK = 12345, 7
PROGRAM = Path(__file__).with_name("sandbox_program.py")
LOCAL_ONLY, ANY_NETWORK = ["10.255.255.0/30"], ["0.0.0.0/0", "::/0"]


@dataclass(frozen=True)
class User:
    """A user of the sandbox, and a Python that this user can run."""

    name: str
    prefix: tuple[str, ...]
    python: str


def users() -> list[User]:
    me = User("me", (), sys.executable)
    if os.geteuid():
        return [me]
    drop = ("setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups")
    return [me, User("ordinary", drop, SYSTEM_PYTHON)]


@pytest.fixture(params=users(), ids=lambda user: user.name)
def user(request: pytest.FixtureRequest) -> User:
    if request.param.prefix:
        require("a Python for all users")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def place(user: User) -> Iterator[Path]:
    """A directory of the user's, with the worker and a private file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        (directory / "worker.pyz").write_bytes(pack_worker())
        (directory / "private").write_text("samples")
        (directory / "program.py").write_text(PROGRAM.read_text())
        (directory / "private").chmod(0o600)
        if user.prefix:
            for path in (directory, *directory.iterdir()):
                os.chown(path, ORDINARY, ORDINARY)
        yield directory


class Sandbox:
    """A running sandbox; its output as it comes."""

    def __init__(
        self,
        user: User,
        place: Path,
        command: Sequence[str],
        *,
        is_confined: bool = True,
        key: str = "",
        peers: Sequence[str] = LOCAL_ONLY,
        scripts: dict[str, str] | None = None,
        memory_bytes: int = 1 << 30,
    ) -> None:
        policy = {
            "user": user_of_link("run", RANK),
            "memory_bytes": memory_bytes,
            "command": [user.python, *command],
            "is_confined": is_confined,
            "key": key,
            "peers": list(peers),
            "scripts": scripts or {},
        }
        self.process = subprocess.Popen(
            [*user.prefix, user.python, "-u", "worker.pyz", "sandbox"],
            cwd=place,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin
        self.process.stdin.write(json.dumps(policy) + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def read_line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        assert not line.startswith("Traceback"), self.read_all()
        return line

    def read_all(self) -> str:
        assert self.process.stdout
        return self.process.stdout.read()


@contextlib.contextmanager
def outside(user: User, place: Path) -> Iterator[list[str]]:
    """Run a process of the same user that the program attacks; yield the program's arguments."""
    code = """if True:
        import os, socket, sys, threading
        tcp = socket.create_server(("127.0.0.1", 0))
        abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0" + sys.argv[1]); abstract.listen(500)
        path = socket.socket(socket.AF_UNIX); path.bind(sys.argv[2]); path.listen(500)
        datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); datagrams.bind(sys.argv[3])
        os.chmod(sys.argv[2], 0o777); os.chmod(sys.argv[3], 0o777)
        import signal; signal.signal(signal.SIGURG, signal.SIG_IGN)
        print(os.getpid(), tcp.getsockname()[1], flush=True)
        def serve():
            while True: tcp.accept()
        threading.Thread(target=serve, daemon=True).start()
        sys.stdin.read()
    """
    abstract = f"csdctl-test/{secrets.token_hex(4)}"
    path, datagrams = str(place / "socket"), str(place / "datagrams")
    with subprocess.Popen(
        [*user.prefix, user.python, "-c", code, abstract, path, datagrams],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        pid, port = process.stdout.readline().split()
        yield [pid, port, abstract, path, datagrams, str(place)]
        process.communicate()


def attempts(user: User, place: Path, arguments: Sequence[str], *, is_confined: bool) -> dict[str, str]:
    """Return which attempts of the program succeeded or were refused."""
    scripts = {"program.py": (place / "program.py").read_text()}
    command = ["program.py", *arguments]
    with Sandbox(user, place, command, is_confined=is_confined, scripts=scripts) as sandbox:
        printed = sandbox.read_all()
    print(printed)
    results = re.findall(r"^(succeeded|refused): (\w+)", printed, re.MULTILINE)
    assert len(results) > 35
    return {name: result for result, name in results}


NEED_MORE = {
    "trace",
    "connect_while_the_address_changes",
    "enter_user_namespace",
    "use_rings",
    "read_memory",
    "bind_low_port",
    "schedule_other_process",
}
"""Attempts that a machine may refuse without a sandbox too, and races that may be lost."""


@pytest.mark.attack(2)
def test_program_in_the_sandbox_reaches_nothing(user: User, place: Path) -> None:
    with outside(user, place) as arguments:
        results = attempts(user, place, arguments, is_confined=True)
    assert [name for name, result in results.items() if result == "succeeded"] == []
    assert (place / "private").read_text() == "samples"


def test_the_same_program_without_a_sandbox_reaches_everything(user: User, place: Path) -> None:
    with outside(user, place) as arguments:
        results = attempts(user, place, arguments, is_confined=False)
    refused = {name for name, result in results.items() if result == "refused"}
    assert refused <= NEED_MORE


LISTENING = """
import socket, sys
listening = socket.create_server(("", 0))
print(listening.getsockname()[1], flush=True)
accepted, peer = listening.accept()
print("accepted", peer[0], accepted.recv(5).decode(), flush=True)
"""
CONNECTING = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(b"hello")
print("sent", flush=True)
"""


def tries_to_connect(port: int, source: str = "127.0.0.1", content: bytes = bytes(64)) -> bool:
    """Connect from `source` and send; return whether anything was received or the connection stayed open."""
    with socket.socket() as connecting:
        connecting.settimeout(1.0)
        connecting.bind((source, 0))
        try:
            connecting.connect(("127.0.0.1", port))
            connecting.sendall(content)
            return bool(connecting.recv(1))
        except OSError:
            return False


class Members:
    """Sandboxes of one group, which has a key; peers are on this machine."""

    def __init__(self, user: User, place: Path) -> None:
        self.start = functools.partial(Sandbox, user, place, key=secrets.token_hex(32), peers=["127.0.0.0/8"])

    def assert_member_gets_in(self, port: int) -> None:
        with self.start(["-c", CONNECTING, str(port)]) as member:
            assert member.read_all() == "sent\n"


@pytest.fixture
def members(user: User, place: Path) -> Members:
    return Members(user, place)


@pytest.mark.attack(3)
def test_only_members_of_the_group_are_accepted(members: Members) -> None:
    with members.start(["-c", LISTENING]) as listening:
        port = int(listening.read_line())
        for content in (b"", b"x", bytes(32), secrets.token_bytes(4096)):
            assert not tries_to_connect(port, content=content)
        with members.start(["-c", CONNECTING, str(port)], key=secrets.token_hex(32)) as stranger:
            stranger.read_all()
        members.assert_member_gets_in(port)
        assert listening.read_line() == "accepted 127.0.0.1 hello"


@pytest.mark.attack(3)
def test_token_for_another_port_is_not_accepted(members: Members) -> None:
    with members.start(["-c", LISTENING]) as listening:
        port = int(listening.read_line())
        with socket.create_server(("127.0.0.1", 0)) as relay:
            members.assert_member_gets_in(relay.getsockname()[1])
            connection, _ = relay.accept()
            with connection, connection.makefile("rb") as stream:
                seen = stream.read()
        assert len(seen) == 32 + len("hello")
        assert not tries_to_connect(port, content=seen)
        members.assert_member_gets_in(port)
        assert listening.read_line() == "accepted 127.0.0.1 hello"


WAITING = """
import select, socket, sys
listening = socket.create_server(("", 0), backlog=int(sys.argv[1]))
listening.setblocking(False)
print(listening.getsockname()[1], flush=True)
while True:
    select.select([listening], [], [])
    try:
        accepted, peer = listening.accept()
    except BlockingIOError:
        continue
    break
accepted.setblocking(True)
print("accepted", accepted.recv(5).decode(), flush=True)
"""


@pytest.mark.attack(3)
@pytest.mark.parametrize(
    ("backlog", "content"),
    [pytest.param(200, b"x", id="begin a token"), pytest.param(1, b"", id="fill the queue")],
)
def test_strangers_do_not_hold_up_a_member(members: Members, backlog: int, content: bytes) -> None:
    with contextlib.ExitStack() as strangers, members.start(["-c", WAITING, str(backlog)]) as listening:
        port = int(listening.read_line())
        for _ in range(min(backlog, 100) + 5):
            stranger = strangers.enter_context(socket.socket())
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                stranger.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):  # not connected yet
                stranger.send(content)
        members.assert_member_gets_in(port)
        assert listening.read_line() == "accepted hello"


@pytest.mark.attack(3)
@pytest.mark.needs("root")
def test_port_does_not_exist_outside_of_the_networks(place: Path) -> None:
    me = users()[0]
    with Sandbox(me, place, ["-c", LISTENING], peers=["127.0.0.8/30", "fd77::/64"]) as listening:
        port = int(listening.read_line())
        with socket.socket() as connecting:
            connecting.settimeout(0.5)
            connecting.bind(("127.0.0.1", 0))
            with pytest.raises(TimeoutError):
                connecting.connect(("127.0.0.1", port))
        with socket.socket() as connecting:
            connecting.bind(("127.0.0.9", 0))
            connecting.connect(("127.0.0.1", port))
            connecting.sendall(b"hello")
        assert listening.read_line() == "accepted 127.0.0.9 hello"


@pytest.mark.attack(3)
def test_connection_from_elsewhere_is_closed_where_the_kernel_does_not_filter(
    user: User, place: Path
) -> None:
    key = secrets.token_hex(32)
    start = functools.partial(Sandbox, user, place, key=key)
    with start(["-c", LISTENING], peers=["127.0.0.1/32", "127.0.0.9/32"]) as listening:
        port = int(listening.read_line())
        assert not tries_to_connect(port, source="127.0.0.8")
        with start(["-c", CONNECTING, str(port)], peers=["127.0.0.1/32"]) as peer:
            assert peer.read_all() == "sent\n"
        assert listening.read_line() == "accepted 127.0.0.1 hello"


REACHING = """
import socket, sys
for host in sys.argv[2:]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connecting:
        try:
            connecting.connect((host, int(sys.argv[1])))
        except ConnectionRefusedError:
            print("refused", host, flush=True)
        else:
            print("reached", host, flush=True)
"""
THIS_MACHINE = ("127.0.0.1", "127.1.2.3", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1", "::ffff:0.0.0.0")


@pytest.mark.attack(2)
@pytest.mark.parametrize("is_confined", [True, False])
def test_services_of_this_machine_are_closed_where_any_network_may_connect(
    user: User, place: Path, *, is_confined: bool
) -> None:
    """A fleet without `network:` has peers at all addresses, but none here."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as service:
        command = ["-c", REACHING, str(service.getsockname()[1]), *THIS_MACHINE]
        with Sandbox(user, place, command, is_confined=is_confined, peers=ANY_NETWORK) as sandbox:
            answers = sandbox.read_all().splitlines()
    assert answers == [f"{'refused' if is_confined else 'reached'} {host}" for host in THIS_MACHINE]


CLOSED_PORT = """
import socket, sys, time
with socket.socket() as own:
    own.bind(("127.0.0.1", 0))
    port = own.getsockname()[1]
print(port, flush=True)
while True:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        with open("/proc/net/tcp") as table:
            if f"0100007F:{port:04X} 00000000:0000 0A" in table.read():
                print("refused", flush=True)
                break
        time.sleep(0.01)
    else:
        print("reached", flush=True)
        break
"""


@pytest.mark.attack(2)
@pytest.mark.parametrize("is_confined", [True, False])
def test_port_that_the_sandbox_has_given_back_belongs_to_the_service_that_takes_it(
    user: User, place: Path, *, is_confined: bool
) -> None:
    with (
        Sandbox(user, place, ["-c", CLOSED_PORT], is_confined=is_confined) as sandbox,
        socket.create_server(("127.0.0.1", int(sandbox.read_line()))),
    ):
        assert sandbox.read_line() == ("refused" if is_confined else "reached")


@pytest.mark.attack(2)
@pytest.mark.needs("root")  # to listen at a port below 1024
def test_low_ports_of_peers_are_closed(user: User, place: Path) -> None:
    """MPI never listens there: they are services of the peers' machines, such as SSH."""
    for expected, ports in (("refused", range(1023, 599, -1)), ("reached", range(1))):
        with listen_at_one_of(ports) as service:
            command = ["-c", REACHING, str(service.getsockname()[1]), "127.0.0.1"]
            with Sandbox(user, place, command, peers=["127.0.0.0/8"]) as sandbox:
                assert sandbox.read_all() == f"{expected} 127.0.0.1\n"


def listen_at_one_of(ports: Sequence[int]) -> socket.socket:
    """Return a server at the first port that is free."""
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise OSError("no port is free")


OF_ANOTHER_PROCESS = {"read_environment", "open_files_of_others", "signal_process"}


@pytest.mark.attack(20)
@pytest.mark.parametrize("is_confined", [True, False])
def test_sandboxes_of_one_user_do_not_see_each_other(user: User, place: Path, *, is_confined: bool) -> None:
    """As an ordinary user all links are of one user, as are those of two runs."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with Sandbox(user, place, ["-c", code], is_confined=is_confined) as victim:
        arguments = [victim.read_line(), "1", "none", "none", "none", str(place)]
        results = attempts(user, place, arguments, is_confined=is_confined)
    expected = "refused" if is_confined else "succeeded"
    assert {results[name] for name in OF_ANOTHER_PROCESS} == {expected}


def test_sandbox_ends_with_its_input_and_leaves_nothing(user: User, place: Path) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), os.getcwd(), flush=True)
        time.sleep(600)
os._exit(0) if os.fork() else time.sleep(600)
"""
    with Sandbox(user, place, ["-c", code]) as sandbox:
        pid, scratch = sandbox.read_line().split()
        assert Path(scratch).is_dir()
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert not Path(scratch).exists()


def test_exit_code_is_that_of_the_command(user: User, place: Path) -> None:
    for code, expected in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        sandbox = Sandbox(user, place, ["-c", code])
        assert sandbox.process.wait() == expected


@pytest.mark.attack(2)
def test_environment_of_the_user_stays_outside(
    user: User, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SSH_AUTH_SOCK", "HTTPS_PROXY", "AWS_SECRET_ACCESS_KEY", "HOME", "PYTHONPATH"):
        monkeypatch.setenv(name, "/secret")
    monkeypatch.setenv("OMPI_MCA_x", "7")
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")  # as csdctl starts it, unless packages are at home
    code = (
        "import os, sys; print(dict(os.environ), os.getuid(), repr(sys.stdin.read()), os.getcwd(), sep='|')"
    )
    with Sandbox(user, place, ["-c", code]) as sandbox:
        environment, uid, read, scratch = sandbox.read_all().strip().split("|")
    assert "/secret" not in environment
    assert "'OMPI_MCA_x': '7'" in environment
    assert f"'HOME': '{scratch}'" in environment
    assert f"'TMPDIR': '{scratch}'" in environment
    assert read == "''", "nothing is read from csdctl's input"
    assert (
        int(uid) == (user_of_link("run", RANK) if user.name == "me" and os.geteuid() == 0 else int(uid)) != 0
    )


EXHAUSTING = {
    "memory": """
        parts = []
        while len(parts) < 64:
            parts.append(bytearray(1 << 24))
    """,
    "files": """
        for number in range(500):
            with open(f"file-{number}", "wb") as file:
                file.write(bytes(1 << 10))
    """,
    "removed files": """
        kept = []
        for number in range(500):
            kept.append(os.open(".", os.O_TMPFILE | os.O_WRONLY) if number % 2 else os.open("x", os.O_CREAT))
            os.close(kept[-1])
    """,
    "directories": """
        for number in range(500):
            os.mkdir(f"directory-{number}")
    """,
    "file size": """
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("file", "wb", 0) as file:
            for _ in range(64):
                if file.write(bytes(1 << 20)) < 1 << 20:
                    raise OSError("cut short")
    """,
    "open files": """
        kept = [os.dup(0) for _ in range(500)]
    """,
    "processes": """
        for number in range(300):
            if os.fork() == 0:
                time.sleep(600)
    """,
    "short processes": """
        for number in range(300):
            if os.fork() == 0:
                os._exit(0)
            os.wait()
    """,
    "threads": """
        for number in range(300):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    """,
}
EXHAUST = """
import os, threading, time
try:
    {code}
except (OSError, MemoryError, RuntimeError) as error:
    print("refused", type(error).__name__, flush=True)
else:
    print("succeeded", flush=True)
os._exit(0)
"""


@pytest.mark.attack(19)
@pytest.mark.parametrize("is_confined", [True, False])
@pytest.mark.parametrize("name", EXHAUSTING)
def test_sandbox_cannot_exhaust_the_machine(user: User, place: Path, name: str, *, is_confined: bool) -> None:
    code = EXHAUST.replace("    {code}", EXHAUSTING[name].replace("\n    ", "\n"))
    options = {"memory_bytes": 256 << 20, "is_confined": is_confined}
    with Sandbox(user, place, ["-c", code], **options) as sandbox:  # type: ignore[arg-type]
        line = sandbox.read_line()
    assert line.startswith("refused" if is_confined else "succeeded"), line


CALLING = """
import os, socket, threading
listening, is_over = socket.create_server(("127.0.0.1", 0)), threading.Event()
def wait():
    is_over.wait()
    listening.accept()
for number in range(100):
    threading.Thread(target=wait, daemon=True).start()
print(os.getpid(), flush=True)
is_over.set()
threading.Event().wait()
"""
ACCEPT = {"x86_64": "288", "aarch64": "242"}


def num_calls(pid: str, number: str) -> int:
    """Return how many threads of a process are in this system call."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum((task / "syscall").read_text().split()[0] == number for task in tasks)


@pytest.mark.attack(19)
def test_supervisor_has_a_bounded_number_of_threads_however_many_calls_wait(user: User, place: Path) -> None:
    with Sandbox(user, place, ["-c", CALLING]) as sandbox:
        pid = sandbox.read_line()
        assert eventually(lambda: num_calls(pid, ACCEPT[MACHINE]) == 100)
        status = Path(f"/proc/{sandbox.process.pid}/status").read_text()
        (number,) = re.findall(r"^Threads:\s+(\d+)$", status, re.MULTILINE)
        assert int(number) <= NUM_THREADS + 1


LIMITS = """
from pathlib import Path
print(Path("/proc/self/oom_score_adj").read_text().strip())
try:
    Path("/proc/self/oom_score_adj").write_text("0")
except OSError:
    print("kept")
"""


@pytest.mark.attack(19)
def test_kernel_that_lacks_memory_ends_the_sandbox_first(user: User, place: Path) -> None:
    with Sandbox(user, place, ["-c", LIMITS]) as sandbox:
        assert sandbox.read_all().split() == ["1000", "kept"]
