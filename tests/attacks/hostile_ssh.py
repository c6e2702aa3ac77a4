"""An SSH server that breaks the protocol: what a compromised node may run.

Key exchange and login are real, by paramiko's server side; then an attack sends what it likes.
"""

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko

from csdctl.fleet.model import Node
from tests.patience import WAIT_S, scaled
from tests.unit.transport.conftest import ServerFiles

LOST = (EOFError, OSError, paramiko.SSHException)
"""Errors of sending when the client has closed the connection."""

Command = Callable[["HostileTransport", paramiko.Channel, str], None]


@dataclass
class Attack:
    """Behaviour of a hostile server."""

    on_command: Command = lambda transport, channel, line: None
    """Called in a thread of its own for every command."""
    on_login: Callable[["HostileTransport"], bool] = lambda transport: True
    """Called in the thread of the connection when a key is offered; returns whether it is accepted."""
    on_channel: Callable[["HostileTransport"], None] = lambda transport: None
    """Called before a channel is confirmed."""
    host_key: paramiko.PKey | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    """Attributes of paramiko's Transport, such as the algorithms to offer."""
    transport_class: type["HostileTransport"] | None = None


class HostileTransport(paramiko.Transport):
    """The server's end of a connection, with means to send anything."""

    stopping: threading.Event

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.has_confirmed = threading.Event()
        """Set when the client has been told that its command runs."""

    def _send_user_message(self, data: paramiko.Message) -> None:
        super()._send_user_message(data)
        if data.asbytes()[:1] == bytes([99]):  # SSH_MSG_CHANNEL_SUCCESS
            self.has_confirmed.set()

    def send(self, *parts: int | bool | bytes | str, kind: int) -> None:
        """Send a message of any kind; integers are 32 bits."""
        message = paramiko.Message()
        message.add_byte(bytes([kind]))
        for part in parts:
            if isinstance(part, bool):
                message.add_boolean(part)
            elif isinstance(part, int):
                message.add_int(part)
            else:
                message.add_string(part)
        self.packetizer.send_message(message)

    def send_endlessly(self, *parts: int | bool | bytes | str, kind: int) -> int:
        """Send a message until the client closes the connection; return how many were sent."""
        num_sent = 0
        with contextlib.suppress(*LOST):
            while not self.stopping.is_set():
                self.send(*parts, kind=kind)
                num_sent += 1
        return num_sent

    def send_bytes_endlessly(self, first: bytes, chunk: bytes) -> int:
        """Send raw bytes until the client closes the connection; return how many were sent."""
        num_sent = 0
        with contextlib.suppress(*LOST):
            self.sock.settimeout(None)
            self.sock.sendall(first)
            while not self.stopping.is_set():
                self.sock.sendall(chunk)
                num_sent += len(chunk)
        return num_sent

    def encrypted_header(self, packet_bytes: int) -> bytes:
        """The first bytes of a packet that claims this length, for the cipher in use."""
        header = packet_bytes.to_bytes(4, "big") + bytes(12)
        packetizer: Any = self.packetizer
        engine = packetizer._Packetizer__block_engine_out
        length_is_open = self.local_cipher.endswith("gcm@openssh.com") or "etm" in self.local_mac
        return header if engine is None or length_is_open else bytes(engine.update(header))


class _Host(paramiko.ServerInterface):
    def __init__(self, transport: HostileTransport, attack: Attack) -> None:
        self._transport = transport
        self._attack = attack

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        is_accepted = self._attack.on_login(self._transport)
        return paramiko.AUTH_SUCCESSFUL if is_accepted else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self._attack.on_channel(self._transport)
        return paramiko.OPEN_SUCCEEDED

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        self._attack.on_channel(self._transport)
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        def run() -> None:
            assert self._transport.has_confirmed.wait(scaled(WAIT_S))
            self._attack.on_command(self._transport, channel, command.decode())

        threading.Thread(target=run, daemon=True).start()
        return True


@dataclass
class HostileServer(ServerFiles):
    """A listening hostile server; its files are in `directory`."""

    attack: Attack = field(default_factory=Attack)
    transports: list[HostileTransport] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def node(self, **changes: Any) -> Node:
        return super().node(**{"name": "evil", **changes})

    def serve(self, listening: socket.socket, host_key: paramiko.PKey) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                transport = (self.attack.transport_class or HostileTransport)(connection)
                transport.stopping = self.stopping
                for name, value in self.attack.changes.items():
                    setattr(transport, name, value)
                transport.add_server_key(host_key)
                self.transports.append(transport)
                transport.start_server(threading.Event(), _Host(transport, self.attack))


@contextlib.contextmanager
def hostile_server(directory: Path, attack: Attack) -> Iterator[HostileServer]:
    """Run a server that makes `attack`; its host key is known and it accepts every user's key."""
    directory.mkdir()
    server = HostileServer(directory, attack=attack)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", server.key], check=True)
    host_key = attack.host_key or paramiko.ECDSAKey.generate()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        server.port = listening.getsockname()[1]
        server.trust(f"{host_key.get_name()} {host_key.get_base64()}\n")
        thread = threading.Thread(target=server.serve, args=(listening, host_key), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for transport in server.transports:
                transport.close()


@contextlib.contextmanager
def raw_server(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """Listen on a port that is returned; call `talk` for every connection, in a thread of its own."""
    stopping = threading.Event()
    kept: list[socket.socket] = []

    def run(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            talk(connection, stopping)

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    kept.append(connection)
                    threading.Thread(target=run, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            stopping.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()
