import os
from pathlib import Path

import asyncssh
import pytest

from csdctl.errors import HostKeyError
from csdctl.transport.known_hosts import KnownHosts, fingerprint


def make_key(kind: str = "ssh-ed25519") -> tuple[str, str, bytes]:
    """Return line, type and blob of a key."""
    key = asyncssh.generate_private_key(kind)
    line = key.export_public_key().decode().strip()
    return line, line.split()[0], key.public_data


def load(tmp_path: Path, text: str) -> KnownHosts:
    path = tmp_path / "known_hosts"
    path.write_text(text)
    return KnownHosts.load([path])


def test_revoked_key_is_refused(tmp_path: Path) -> None:
    line, key_type, blob = make_key()
    known_hosts = load(tmp_path, f"10.0.0.1 {line}\n@revoked * {line}\n")
    with pytest.raises(HostKeyError, match="revoked"):
        known_hosts.check("csd0", "10.0.0.1", 22, key_type, blob)


@pytest.mark.parametrize(
    ("names", "is_named"), [("*.lan,!csd0.lan", False), ("*.lan", True), ("[csd0.lan]:2222", False)]
)
def test_certificate_authority_is_named_where_a_key_is_unknown(
    tmp_path: Path, names: str, *, is_named: bool
) -> None:
    line, key_type, blob = make_key()
    known_hosts = load(tmp_path, f"# a comment\n@cert-authority {names} {line}\n")
    with pytest.raises(HostKeyError, match="is unknown") as caught:
        known_hosts.check("csd0", "csd0.lan", 22, key_type, blob)
    ignored = f"@cert-authority in {tmp_path / 'known_hosts'}:2 is ignored"
    assert (ignored in caught.value.message) == is_named


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("fifo", "known_hosts: it is not a regular file"),
        ("directory", "known_hosts: it is a directory"),
        ("\0\0\0\0\n", "known_hosts:1 has no host key"),
        ("csd0 ssh-ed25519 AAAAC3Nza*\n", "known_hosts:1 has no key of type ssh-ed25519"),
        ("csd1 ssh-ed25519 AAAAC3Nza*\n", ""),
        ("\ufffd\ufffd \ufffd\ufffd \ufffd\ufffd\n", "known_hosts:1 has no key of type"),
        ("\r\n \n# a comment\n", ""),
    ],
)
def test_what_cannot_be_read_is_named_where_a_key_is_unknown(
    tmp_path: Path, damage: str, expected: str
) -> None:
    path = tmp_path / "known_hosts"
    if damage == "fifo":
        os.mkfifo(path)  # it has no writer: opening it as a file would wait for ever
    elif damage == "directory":
        path.mkdir()
    else:
        path.write_bytes(damage.encode())
    _, key_type, blob = make_key()
    known_hosts = KnownHosts.load([tmp_path / "missing", path])
    with pytest.raises(HostKeyError, match="is unknown") as caught:
        known_hosts.check("csd0", "csd0", 22, key_type, blob)
    assert expected in caught.value.message
    assert ("known_hosts" in caught.value.message) == bool(expected)


def test_key_of_the_usual_port_is_known_at_others_unless_they_have_their_own(tmp_path: Path) -> None:
    (line, key_type, blob), (second, _, second_blob) = make_key(), make_key()
    known_hosts = load(tmp_path, f"csd0 {line}\n[csd0]:2222 {second}\n")
    known_hosts.check("csd0", "csd0", 2223, key_type, blob)
    with pytest.raises(HostKeyError, match="is unknown"):
        known_hosts.check("csd0", "csd0", 2223, key_type, second_blob)
    with pytest.raises(HostKeyError, match="has changed"):
        known_hosts.check("csd0", "csd0", 2222, key_type, blob)


@pytest.mark.parametrize("old_kind", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
def test_changed_key_names_file_line_and_both_fingerprints(tmp_path: Path, old_kind: str) -> None:
    (old, _, old_blob), (_, key_type, blob) = make_key(old_kind), make_key()
    known_hosts = load(tmp_path, f"\n10.0.0.1 {old}\n")
    with pytest.raises(HostKeyError) as caught:
        known_hosts.check("csd0", "10.0.0.1", 22, key_type, blob)
    for part in ("has changed", f"{tmp_path / 'known_hosts'}:2", fingerprint(old_blob), fingerprint(blob)):
        assert part in caught.value.message
