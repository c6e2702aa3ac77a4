"""SSH servers and networks that other people have: limits, algorithms, accounts, packet sizes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.lab import Lab
from tests.lab.machines import INTERFACE
from tests.lab.network import run_command, run_ip
from tests.lab.project import CSDCTL, Project
from tests.lab.test_connect import make_key

pytestmark = pytest.mark.lab

MTU, GSO_SEGMENTS = 1500, 65535
ALGORITHMS = {
    "KexAlgorithms": "sntrup761x25519-sha512@openssh.com",
    "Ciphers": "chacha20-poly1305@openssh.com",
    "MACs": "umac-128-etm@openssh.com",
    "HostKeyAlgorithms": "ssh-rsa",
}
REFUSALS = {
    "AuthenticationMethods publickey,password": "accepts a key of user 'root', but also wants password",
    "AuthenticationMethods publickey,publickey": "accepts a key of user 'root', but also wants publickey",
    "PubkeyAuthentication no": "takes no keys of user 'root', but password",
    "AllowUsers bob": "AllowUsers",
    "PermitRootLogin no": "PermitRootLogin",
}


@contextmanager
def large_packets_dropped(*ends: tuple[str, str]) -> Iterator[None]:
    """Let two interfaces, by namespace and name, send packets that the switch between them drops silently."""

    def set_up(mtu: int, segments: int) -> None:
        for namespace, interface in ends:
            run_ip(
                namespace, f"link set {interface} mtu {mtu}", f"link set {interface} gso_max_segs {segments}"
            )

    set_up(9000, 1)
    try:
        yield
    finally:
        set_up(MTU, GSO_SEGMENTS)


def test_connection_that_drops_large_packets_is_red_with_a_guess(project: Project) -> None:
    lab, node = project.lab, project.lab.near[0]
    project.use(node)
    with large_packets_dropped((lab.host.namespace, lab.front.bridge), (node.namespace, INTERFACE)):
        examined = project.csdctl("doctor")
        sent = project.csdctl("exec", "--", "true", "x" * 20_000)
    node.restart()  # its server does not know that the connections are lost
    assert examined.returncode == 1
    assert sent.returncode == 4
    for done in (examined, sent):
        said = done.stdout + done.stderr
        assert "large packets may be dropped on the way (a guess): compare the MTU" in said
        assert "csdctl provision" not in said
    assert project.csdctl("doctor").returncode == 0


@pytest.mark.thorough
@pytest.mark.fault(9)
def test_training_works_where_a_connection_has_one_session(project: Project, job: Path) -> None:
    node = project.lab.near[0]
    project.use(node)
    with node.with_sshd("MaxSessions 1"):
        done = project.csdctl("train", str(job), "--batch-size", "16")
        num_connections = node.log.count("Accepted publickey")
    assert done.returncode == 0, done.stdout + done.stderr
    assert num_connections > 1


@pytest.mark.parametrize("keyword", ALGORITHMS)
def test_line_for_sshd_that_is_said_to_help_does(project: Project, keyword: str) -> None:
    node = project.lab.near[0]
    rsa = node.directory / "rsa"  # nodes do not see the project
    more_lines = {"MACs": ["Ciphers aes128-ctr"], "HostKeyAlgorithms": [f"HostKey {rsa}"]}
    if not rsa.exists():
        run_command("ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(rsa))
    project.use(node)
    with node.with_sshd(f"{keyword} {ALGORITHMS[keyword]}", *more_lines.get(keyword, ())):
        refused = project.csdctl("exec", "--", "true")
    said = refused.stdout + refused.stderr
    assert refused.returncode == 4
    assert f"it has {keyword} {ALGORITHMS[keyword]}; csdctl has " in said
    [line] = re.findall("write in its sshd_config: (.*)", said)
    with node.with_sshd(line, *more_lines.get(keyword, ())):
        assert project.csdctl("trust", "--forget", "--yes").returncode == 0
        assert project.csdctl("trust", "--yes").returncode == 0
        assert project.csdctl("exec", "--", "true").returncode == 0


@pytest.mark.parametrize("line", REFUSALS)
def test_login_that_a_key_does_not_open_says_what_is_wanted(project: Project, line: str) -> None:
    node = project.lab.near[0]
    project.use(node)
    with node.with_sshd(line, *(["PasswordAuthentication yes"] if "password" in REFUSALS[line] else [])):
        said = project.refuse("exec", "--", "true", code=4)
    assert REFUSALS[line] in said
    assert "ssh-copy-id" not in said


def test_text_of_a_server_that_refuses_an_account_is_shown(project: Project) -> None:
    node = project.lab.near[0]
    project.use(node)
    with node.with_sshd("UsePAM yes"):
        (node.directory / "shadow").write_text("root:*:19000:0:99999:7::18000:\n")
        said = project.refuse("exec", "--", "true", code=4)
    assert "it says: Your account has expired" in said


def test_certificate_is_offered_beside_its_key_and_named_once_it_has_expired(project: Project) -> None:
    node = project.lab.near[0]
    authority, key = make_key(node.directory / "authority"), make_key(project.path / "id")
    project.trust(node)
    project.write_fleet(replace(node.node, key=key))

    def sign(validity: str) -> None:
        options = ["-q", "-s", str(authority), "-I", "me", "-n", "root", "-V", validity]
        run_command("ssh-keygen", *options, f"{key}.pub")

    with node.with_sshd(f"TrustedUserCAKeys {authority}.pub"):
        for validity, expected in (("-1h:+1h", 0), ("20200101:20210101", 4), ("+1d:+2d", 4)):
            sign(validity)
            done = project.csdctl("exec", "--", "true")
            assert done.returncode == expected, done.stdout + done.stderr
            end = {"2": "is expired", "+": "is not valid yet"}.get(validity[0], "")
            assert not end or f"the certificate 'me' {end}" in done.stdout + done.stderr
    (node.home / ".ssh/authorized_keys").write_text(key.with_suffix(".pub").read_text())
    assert project.csdctl("exec", "--", "true").returncode == 0
    node.restart()


def test_host_key_in_the_file_of_the_system_is_known(project: Project, lab: Lab) -> None:
    node = lab.near[0]
    project.write_fleet(node)
    system = 'mount -t tmpfs tmpfs /etc/ssh && printf %s "$1" >/etc/ssh/ssh_known_hosts && shift && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", system, "sh", node.known_hosts_line]
    done = lab.host.run(*words, str(CSDCTL), "exec", "--", "true", cwd=project.path)
    assert done.returncode == 0, done.stdout + done.stderr
