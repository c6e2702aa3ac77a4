"""The algorithms that csdctl offers to SSH servers: those of OpenSSH 9, as far as paramiko has them.

Not offered: group exchange, whose numbers a server chooses: Python calculates with 8192 bits for seconds, and
no other thread runs meanwhile. MD5, truncated MACs, CBC and compression, which OpenSSH does not offer either.
paramiko 5 has neither ssh-dss nor signatures with SHA-1.
"""

from collections.abc import Collection

import paramiko

from csdctl.errors import HostKeyError

MIN_RSA_BITS = 1024
"""Of host keys; the default of OpenSSH's RequiredRSASize."""

# AES-GCM needs no separate MAC and is hardware-accelerated on both sides: large uploads take half the time.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = (
    "hmac-sha2-256-etm@openssh.com",
    "hmac-sha2-512-etm@openssh.com",
    "hmac-sha2-256",
    "hmac-sha2-512",
    "hmac-sha1",
)


def choose_algorithms(options: paramiko.transport.SecurityOptions, known_key_types: Collection[str]) -> None:
    """Restrict `options` of a new connection.

    Host keys of types that known_hosts has come first, as in ssh: a server may have keys of several types.
    """
    options.ciphers = [name for name in _CIPHERS if name in options.ciphers]
    options.digests = [name for name in _MACS if name in options.digests]
    options.kex = [name for name in options.kex if "group-exchange" not in name]
    options.key_types = sorted(
        options.key_types, key=lambda name: _known_hosts_type(name) not in known_key_types
    )


def check_strength(node: str, key: paramiko.PKey) -> None:
    """Raise HostKeyError for a host key that is too short."""
    if key.get_name() == "ssh-rsa" and key.get_bits() < MIN_RSA_BITS:
        raise HostKeyError(
            f"its host key is RSA with {key.get_bits()} bits, but {MIN_RSA_BITS} are the least",
            node=node,
            remedy="generate one on the node: ssh-keygen -q -t ed25519 -f /etc/ssh/ssh_host_ed25519_key",
        )


def _known_hosts_type(algorithm: str) -> str:
    """Return the key type in known_hosts for a signature algorithm."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm
