"""SSH: known_hosts, the output of `ssh -G`, and the packets of a server."""

import contextlib
import io
from pathlib import Path
from typing import Any

from csdctl.errors import HostKeyError, InputError
from csdctl.fleet import openssh
from csdctl.fleet.model import parse_jump
from csdctl.transport import strict_transport
from csdctl.transport.known_hosts import KnownHosts
from tests.fuzz.target import Form, Target
from tests.unit.transport.test_strict_transport import plain_packet


def _known_hosts(content: bytes, directory: Path) -> None:
    path = directory / "known_hosts"
    path.write_bytes(content)
    known = KnownHosts.load([path, directory / "missing"])
    for address, port in (("10.1.1.10", 22), ("csd0", 2222), ("fd00::2", 22)):
        known.lookup(address, port)
    known.check("csd0", "10.1.1.10", 22, "ssh-ed25519", b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes(32))


KNOWN_HOSTS = b"""\
10.1.1.10,csd0 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA a comment
|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQ==
[csd0]:2222,!csd9,*.lab,csd? ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
@revoked * ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQ==
# a comment
@cert-authority *.lab ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQ==
"""


class _Channel:
    """An open channel with nothing in its buffers."""

    in_buffer, in_stderr_buffer = b"", b""
    in_window_size = out_window_size = 2 << 20


class _Server:
    """The other end of a connection: sends these bytes, and closes it. What the rules ask is here too."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)
        self.packetizer = strict_transport.GreedyPacketizer(self)
        self.channels_seen = {0: True}
        self.num_logins_requested = 1
        self.packetizer.check = strict_transport.ServerRules(self).check

    def recv(self, num_bytes: int) -> bytes:
        return self._content.read(min(num_bytes, 4000))

    def send(self, content: bytes) -> int:
        return len(content)

    def is_authenticated(self) -> bool:
        return True

    @property
    def _channels(self) -> dict[int, Any]:
        return {0: _Channel()}


def _ssh_packets(content: bytes, directory: Path) -> None:
    packetizer = _Server(content).packetizer
    while not packetizer.readline(1).startswith("SSH-"):
        pass
    with contextlib.suppress(EOFError):
        while True:
            packetizer.read_message()


def _packet_seeds() -> list[bytes]:
    channel = bytes(4)
    payloads = [
        *(b"\x02" + b"\0\0\0\x03abc", b"\x06" + b"\0\0\0\x0cssh-userauth", b"\x14" + bytes(62)),
        *(b"\x5e" + channel + b"\0\0\0\x05hello", b"\x5d" + channel + b"\0\0\x10\0", b"\x60" + channel),
        b"\x62" + channel + b"\0\0\0\x0bexit-status\0\0\0\0\0",
    ]
    return [b"Hello\r\nSSH-2.0-OpenSSH_9.2\r\n" + b"".join(map(plain_packet, payloads))]


def _ssh_settings(content: bytes, directory: Path) -> None:
    always = "hostname 10.1.1.10\nuser root\nport 22\n"
    settings = openssh.parse_settings(always + content.decode(errors="replace"))
    keys = openssh.list_keys(settings, {}, directory)
    openssh.list_notes(settings, openssh.parse_settings(always), keys)
    str(openssh.build_node(openssh.Target("csd0", "csd0"), settings, keys, None))
    for command in settings.get("proxycommand", ()):
        openssh.parse_proxy_command(command)
    for jump in settings.get("proxyjump", ()):
        _parse_jump(jump)


def _parse_jump(text: str) -> None:
    try:
        parse_jump(text)
    except ValueError as error:
        raise InputError(str(error)) from None


SSH_SETTINGS = b"""\
host csd0
identityfile ~/.ssh/id_%h
identityfile /etc/keys/%r.pub
userknownhostsfile /root/.ssh/known_hosts "/root/.ssh/known hosts2"
stricthostkeychecking accept-new
proxycommand ssh -o 'User=ops' -W [%h]:%p -p 2222 ops@gate
proxyjump ops@[fd00::1]:22,gate
ciphers aes128-ctr
"""

TARGETS = (
    Target(
        *("known-hosts", Form.LINES, _known_hosts, (HostKeyError,), lambda: [KNOWN_HOSTS]),
        (b"|1|", b"@revoked ", b"*?"),
    ),
    Target(
        *("ssh-packets", Form.BINARY, _ssh_packets, (strict_transport.SshProtocolError, EOFError)),
        _packet_seeds,
        (plain_packet(b"\x14" + bytes(62)), plain_packet(b"\x5d" + bytes(8)), b"SSH-2.0-x\n"),
    ),
    Target("ssh-settings", Form.LINES, _ssh_settings, (InputError,), lambda: [SSH_SETTINGS]),
)
