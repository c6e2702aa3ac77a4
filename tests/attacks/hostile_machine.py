"""Machines that lie: an SSH server whose commands answer what the attacker wrote, and a false greeting."""

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncssh
import yaml

# The probes run as `sh -c SCRIPT csdctl-probes PYTHON`; everything else reaches the real shell.
SHELL = """\
#!/bin/sh
if [ "$3" = csdctl-probes ]; then exec cat "{facts}"; fi
exec /bin/sh "$@"
"""
# csdctl's programs and the worker: an answer, a complaint, and a failure.
PYTHON = """\
#!/bin/sh
printf '%s\\n' "$(cat "{answer}")"
cat "{complaint}" >&2
exit 1
"""


@dataclass(frozen=True)
class HostileMachine:
    """What the machine answers, as files that a test may write at any time; and where it listens."""

    home: Path
    port: int
    host_key: str

    def answer(self, *, facts: str = "", output: str = "", complaint: str = "") -> None:
        """Set what probes, what the machine's Python prints, and what it complains about."""
        for name, text in (("facts", facts), ("output", output), ("complaint", complaint)):
            (self.home / name).write_bytes(text.encode(errors="surrogatepass"))


@contextlib.contextmanager
def hostile_machine(directory: Path, banner: str = "") -> Iterator[HostileMachine]:
    """Serve one machine that accepts every login; `banner` is sent before it."""
    home, programs = directory / "home", directory / "programs"
    home.mkdir(parents=True)
    programs.mkdir()
    for name, text in (
        ("sh", SHELL.format(facts=home / "facts")),
        ("liar", PYTHON.format(answer=home / "output", complaint=home / "complaint")),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home)}

    class Server(asyncssh.SSHServer):
        def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
            self._connection = connection

        def begin_auth(self, username: str) -> bool:
            if banner:
                self._connection.send_auth_banner(banner)
            return True

        def public_key_auth_supported(self) -> bool:
            return True

        def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
            return True

    async def run(process: "asyncssh.SSHServerProcess[bytes]") -> None:
        child = subprocess.Popen(
            ["/bin/sh", "-c", process.command or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=home,
            env=environment,
            start_new_session=True,
        )
        await process.redirect(child.stdin, child.stdout, child.stderr)
        process.exit(await asyncio.to_thread(child.wait))

    key = asyncssh.generate_private_key("ssh-ed25519")

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Server,
            server_host_keys=[key],
            process_factory=run,
            encoding=None,
        )

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    acceptor = asyncio.run_coroutine_threadsafe(listen(), loop).result(30)
    try:
        machine = HostileMachine(home, acceptor.get_port(), key.export_public_key().decode().strip())
        machine.answer()
        yield machine
    finally:
        loop.call_soon_threadsafe(acceptor.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@contextlib.contextmanager
def greeting(sent: bytes) -> Iterator[int]:
    """Serve connections with `sent` instead of SSH's greeting, and close them; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(sent)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(1 << 16):
                            pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def write_fleet(directory: Path, nodes: dict[str, int], trusted: dict[str, HostileMachine]) -> None:
    """Write fleet.yaml, a key, and the host keys of the machines in `trusted`."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(str(directory / "key"))
    os.chmod(directory / "key", 0o600)
    entries = [{"name": name, "address": "127.0.0.1", "port": port} for name, port in nodes.items()]
    fleet = {"defaults": {"user": "me", "key": str(directory / "key"), "python": "liar"}, "nodes": entries}
    (directory / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    (directory / ".csdctl").mkdir()
    lines = [f"[127.0.0.1]:{machine.port} {machine.host_key}\n" for machine in trusted.values()]
    (directory / ".csdctl" / "known_hosts").write_text("".join(lines))


Serve = Callable[..., contextlib.AbstractContextManager[HostileMachine]]
