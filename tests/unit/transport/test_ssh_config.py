import subprocess
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.model import Node
from csdctl.fleet.openssh import build_ssh_config

NODES = (
    Node("csd0", "10.1.2.3", user="root", key=Path("/keys/id ed25519")),
    Node("csd1", "fe80::1%eth0", port=2222, user="trainer"),
    Node("csd2", "10.9.0.2", jump=Node("gate", "10.0.0.1", user="admin", jump=Node("outer", "10.0.0.9"))),
    Node("csd3", "10.9.0.3", jump=Node("gate", "10.0.0.1", user="admin", jump=Node("outer", "10.0.0.9"))),
)
KNOWN_HOSTS = (Path("/project dir/.csdctl/known_hosts"), Path("/home/me/100%/known_hosts"))


@pytest.mark.needs("ssh")
def test_ssh_parses_the_config_as_intended(tmp_path: Path) -> None:
    path = tmp_path / "ssh_config"
    path.write_text(build_ssh_config(NODES, KNOWN_HOSTS))

    def ask(alias: str) -> dict[str, str]:
        printed = subprocess.run(
            ["ssh", "-G", "-F", path, alias], capture_output=True, text=True, check=True
        ).stdout
        return dict(line.split(" ", 1) for line in printed.splitlines() if " " in line)

    first, second = ask("csd0"), ask("csd1")
    assert (first["hostname"], first["port"], first["user"]) == ("10.1.2.3", "22", "root")
    assert first["identityfile"] == "/keys/id ed25519"
    assert first["identitiesonly"] == "yes"
    assert (second["hostname"], second["port"], second["user"]) == ("fe80::1%eth0", "2222", "trainer")
    assert second["identitiesonly"] == "no"
    for config in (first, second):
        assert config["stricthostkeychecking"] == "true"
        assert config["batchmode"] == "yes"
        assert "/project dir/.csdctl/known_hosts" in config["userknownhostsfile"]


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a${HOME}b", "a\\b"])
def test_paths_that_ssh_config_cannot_represent_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="ssh_config"):
        build_ssh_config([Node("csd0", "10.1.2.3", key=Path("/keys") / name)], KNOWN_HOSTS)
