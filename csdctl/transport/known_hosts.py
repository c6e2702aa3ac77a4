"""Known host keys: a fast parser of OpenSSH's known_hosts files, with its rules for lines, fields and names.

Lines end at \\n and fields at spaces and tabs, and nowhere else. The rest after the key is a comment, which
anybody may have written. Plain names are looked up in a dictionary. Only hashed names and patterns are
matched one by one. Certificate authorities (`@cert-authority`) are not supported. The error for an unknown
key names their lines.
"""

import base64
import binascii
import fnmatch
import hashlib
import hmac
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.documents import open_regular
from csdctl.errors import HostKeyError, InputError

_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)

_IGNORED = dict.fromkeys(map(ord, "\v\f\r"))
"""White space that OpenSSH ignores within a key in base64, such as the end of a line that ends in \\r\\n."""


@dataclass(frozen=True)
class HostKey:
    """A key of a known_hosts file, with its location."""

    type: str
    blob: bytes
    path: Path
    line: int
    is_revoked: bool = False


@dataclass
class KnownHosts:
    """All keys of some known_hosts files, in file order."""

    _by_name: dict[str, list[HostKey]] = field(default_factory=dict)
    _by_pattern: list[tuple[tuple[str, ...], HostKey]] = field(default_factory=list)
    _unsupported: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    @classmethod
    def load(cls, paths: Iterable[Path]) -> "KnownHosts":
        """Read `paths`. The error for an unknown key names what cannot be read in them."""
        known_hosts = cls()
        for path in paths:
            try:
                for number, line in enumerate(load_lines(path), start=1):
                    known_hosts._add_line(line, path, number)
            except FileNotFoundError:
                continue
            except (InputError, OSError) as error:
                known_hosts._unsupported.append((("*",), str(error)))
        return known_hosts

    def lookup(self, address: str, port: int) -> tuple[HostKey, ...]:
        """Return every known key for `address` at `port`."""
        name = build_host_name(address, port)
        by_pattern = (key for patterns, key in self._by_pattern if _matches(patterns, name))
        return (*self._by_name.get(name, ()), *by_pattern)

    def check(self, node: str, address: str, port: int, key_type: str, blob: bytes) -> None:
        """Raise HostKeyError unless the key presented by `address` at `port` is known."""
        presented = f"{key_type} {fingerprint(blob)}"
        keys = self.lookup(address, port)
        if all(key.is_revoked for key in keys):  # as in ssh, its key at the usual port will do
            keys += tuple(key for key in self.lookup(address, 22) if key.blob == blob)
        same = [key for key in keys if key.blob == blob]
        for key in same:
            if key.is_revoked:
                raise HostKeyError(f"its host key {presented} is revoked in {key.path}:{key.line}", node=node)
        if same:
            return
        valid = [key for key in keys if not key.is_revoked]
        if not valid:
            kind = next((name for name in ("ed25519", "ecdsa", "rsa") if name in key_type), "*")
            name = build_host_name(address, port)
            ignored = [f"; {what}" for names, what in self._unsupported if _matches(names, name)]
            raise HostKeyError(
                f"host key of {address} port {port} is unknown: {presented}{''.join(ignored[:2])}",
                node=node,
                remedy=f"compare it with `ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` there, then run: "
                f"csdctl trust --limit {node}",
            )
        expected = next((key for key in valid if key.type == key_type), valid[0])
        raise HostKeyError(
            f"host key of {address} port {port} has changed: received {presented}, "
            f"but {expected.path}:{expected.line} has {expected.type} {fingerprint(expected.blob)}",
            node=node,
            remedy="another machine may have its address now, or this is an attack; if it was reinstalled: "
            f"csdctl trust --forget --limit {node}, then csdctl trust --limit {node}",
        )

    def _add_line(self, line: str, path: Path, number: int) -> None:
        fields = [part for part in line.replace("\t", " ").split(" ") if part]
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if not fields or fields[0].startswith("#") or line.isspace():
            return
        if len(fields) < 3:
            self._unsupported.append((("*",), f"{path}:{number} has no host key"))
            return
        is_hashed = fields[0].startswith("|")
        names = (fields[0],) if is_hashed else tuple(fields[0].translate(_LOWER).split(","))
        if marker not in ("", "@revoked"):
            self._unsupported.append((names, f"{marker} in {path}:{number} is ignored"))
            return
        try:
            blob = base64.b64decode(fields[2].translate(_IGNORED), validate=True)
        except (binascii.Error, ValueError):
            blob = b""
        if not blob.startswith(len(fields[1]).to_bytes(4, "big") + fields[1].encode()):
            names = names if fields[1].startswith(("ssh-", "ecdsa-", "sk-")) else ("*",)  # of anybody
            self._unsupported.append((names, f"{path}:{number} has no key of type {fields[1][:40]}"))
            return
        key = HostKey(fields[1], blob, path, number, is_revoked=bool(marker))
        if is_hashed or any(name.startswith("!") or "*" in name or "?" in name for name in names):
            self._by_pattern.append((names, key))
            return
        for name in names:
            self._by_name.setdefault(name, []).append(key)


def load_lines(path: Path) -> list[str]:
    """Return the lines of a known_hosts file. Raises OSError, and what `open_regular` raises."""
    with open_regular(path) as file:
        text = file.read().decode(errors="replace")  # reading as text would end lines at \r as well
    return text.removesuffix("\n").split("\n") if text else []


def build_host_name(address: str, port: int) -> str:
    """Return the name of `address` at `port` in known_hosts."""
    return address.lower() if port == 22 else f"[{address.lower()}]:{port}"


def fingerprint(blob: bytes) -> str:
    """Return the SHA256 fingerprint of a public key, in the format of ssh."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _matches(patterns: Sequence[str], name: str) -> bool:
    negated = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    is_refused = any(_pattern_matches(pattern, name) for pattern in negated)
    return not is_refused and any(_pattern_matches(pattern, name) for pattern in patterns)


def _pattern_matches(pattern: str, name: str) -> bool:
    if pattern.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in pattern[3:].split("|"))
        except ValueError:
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)
    # In known_hosts, brackets are part of the name, not a character class.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))
