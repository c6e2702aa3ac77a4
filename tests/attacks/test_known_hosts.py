"""A line of known_hosts whose comment, or any other part, pretends to be another line.

OpenSSH is the judge: csdctl knows exactly the keys that `ssh-keygen -F` finds.
"""

import base64
import hmac
import re
import subprocess
from pathlib import Path

import asyncssh
import pytest

from csdctl.errors import HostKeyError
from csdctl.fleet.model import Node
from csdctl.runs.directory import ProjectDirectory
from csdctl.transport.known_hosts import KnownHosts, fingerprint
from csdctl.workflows.discovery.discover import ShownKey, accept_keys, forget_keys

pytestmark = pytest.mark.first(1)

ADDRESS = "10.0.0.1"
LINE_BREAKS_OF_PYTHON = "\v\f\x1c\x1d\x1e\x85\u2028\u2029\r"


def new_key() -> str:
    return str(asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip())


TRUSTED, EVIL = new_key(), new_key()
BODY, EVIL_BODY = TRUSTED.split()[1], EVIL.split()[1]


def found_by_openssh(path: Path, name: str = ADDRESS) -> set[str]:
    """The fingerprints of the keys that are not revoked."""
    printed = subprocess.run(
        ["ssh-keygen", "-l", "-F", name, "-f", path], capture_output=True, check=False
    ).stdout.decode(errors="replace")
    blocks = [part for part in printed.split(f"# Host {name} found: line ") if part]
    accepted = [part for part in blocks if not re.match(r"\d+ (REVOKED|CA)", part)]
    return set(re.findall(r"SHA256:[A-Za-z0-9+/]{43}", "".join(accepted)))


def found_by_csdctl(path: Path, port: int = 22) -> set[str]:
    keys = KnownHosts.load([path]).lookup(ADDRESS, port)
    return {fingerprint(key.blob) for key in keys if not key.is_revoked}


def hashed(name: str) -> str:
    salt = bytes(20)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


MARKED = {
    "in a comment": (f"other {TRUSTED} by·{ADDRESS} {EVIL}\n", ""),
    "between fields": (f"{ADDRESS}·{EVIL}\n{ADDRESS} {EVIL.replace(' ', '·')}\n", "\xa0\u3000"),
    "before the name": (f"·{ADDRESS} {EVIL}\n", "\xa0\ufeff"),
    "in the key": (f"{ADDRESS} ssh-ed25519 {BODY[:9]}·{BODY[9:]}\n", "\xa0"),
    "in a revoked key": (f"@revoked * ssh-ed25519 {BODY[:9]}·{BODY[9:]}\n", ""),
}
"""Place of a line break of Python, ·, or of more characters → text."""
CRAFTED = {
    **{
        f"U+{ord(mark):04X} {place}": text.replace("·", mark)
        for place, (text, more) in MARKED.items()
        for mark in LINE_BREAKS_OF_PYTHON + more
    },
    "lines of Windows": f"{ADDRESS} {TRUSTED}\r\nother {EVIL}\r\n",
    "tabs": f"\t {ADDRESS}\t \tssh-ed25519\t{BODY}\tcomment\n",
    "a comment line": f"#{ADDRESS} {EVIL}\n # {ADDRESS} {EVIL}\n",
    "another type than the key's": f"{ADDRESS} ssh-rsa {EVIL_BODY}\n{ADDRESS} {TRUSTED}\n",
    "an unknown marker": f"@trusted {ADDRESS} {EVIL}\n",
    "a revoked key": f"@revoked {ADDRESS} {EVIL}\n{ADDRESS} {TRUSTED}\n",
    "a certificate authority": f"@cert-authority {ADDRESS} {EVIL}\n{ADDRESS} {TRUSTED}\n",
    "patterns": f"10.0.*,!10.0.0.9 {TRUSTED}\n10.0.0.?,!10.0.0.1 {EVIL}\n[10].0.0.1 {EVIL}\n",
    "a hashed name": f"{hashed(ADDRESS)} {TRUSTED}\n{hashed('other')} {EVIL}\n",
    "a hashed name in a list": f"other,{hashed(ADDRESS)} {EVIL}\n{ADDRESS},{hashed('other')} {TRUSTED}\n",
    "another port": f"[{ADDRESS}]:2222 {EVIL}\n",
    "a zero byte": f"other {TRUSTED}\0{ADDRESS} {EVIL}\n",
}


@pytest.mark.attack(18)
@pytest.mark.parametrize("name", CRAFTED)
def test_csdctl_finds_the_keys_that_openssh_finds(tmp_path: Path, name: str) -> None:
    path = tmp_path / "known_hosts"
    path.write_bytes(CRAFTED[name].encode())
    assert found_by_csdctl(path) == found_by_openssh(path)


@pytest.mark.attack(18)
@pytest.mark.parametrize("mark", LINE_BREAKS_OF_PYTHON)
def test_comment_does_not_become_a_line_when_the_file_is_written_again(tmp_path: Path, mark: str) -> None:
    project = ProjectDirectory(tmp_path)
    project.known_hosts.parent.mkdir(parents=True)
    project.known_hosts.write_bytes(f"other {TRUSTED} by{mark}{ADDRESS} {EVIL}\nold {TRUSTED}\n".encode())
    key = ShownKey(Node("csd1", "10.0.0.2"), "ssh-ed25519", base64.b64decode(BODY), "new")
    accept_keys([key], project)
    assert forget_keys([Node("csd2", "old")], project) == {"csd2": 1}
    assert found_by_openssh(project.known_hosts) == found_by_csdctl(project.known_hosts) == set()
    with pytest.raises(HostKeyError, match="is unknown"):
        KnownHosts.load([project.known_hosts]).check(
            "csd0", ADDRESS, 22, "ssh-ed25519", base64.b64decode(EVIL_BODY)
        )
    assert len(found_by_openssh(project.known_hosts, "10.0.0.2")) == 1


@pytest.mark.attack(18)
def test_names_are_compared_as_openssh_compares_them(tmp_path: Path) -> None:
    # Python's lower() turns the sign of Kelvin, U+212A, into a plain k.
    path = tmp_path / "known_hosts"
    path.write_bytes(f"\u212aoala {EVIL}\nKOALA {TRUSTED}\n".encode())
    keys = KnownHosts.load([path]).lookup("koala", 22)
    assert {fingerprint(key.blob) for key in keys} == found_by_openssh(path, "koala")
    assert len(keys) == 1
