"""Unusual file names arrive; names and links pointing outside the destination are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csdctl.shipping.deliver import build_receiver
from csdctl.shipping.payload import TreeRequest, pack_payload, read_tree
from csdctl.shipping.store import hash_file
from tests.unit.shipping.delivering import Machine, parts, receive, send_tree
from tests.unit.transport.names import NASTY_NAMES

pytestmark = pytest.mark.first(10)


class TestNames:
    @pytest.mark.fault(30)
    @pytest.mark.parametrize("name", [*NASTY_NAMES, os.fsdecode(b"not utf-8 \xff\xfe")])
    def test_any_name_arrives(self, machine: Machine, host: Path, name: str) -> None:
        session, home = machine
        (host / name / name).mkdir(parents=True)
        (host / name / name / name).write_bytes(b"content\0\xff")
        (host / name / "link").symlink_to(name)
        send_tree(session, host / name, f"deep/{name}")
        assert (home / "deep" / name / name / name).read_bytes() == b"content\0\xff"
        assert os.readlink(home / "deep" / name / "link") == name
        assert not list(home.rglob("pwned"))

    @pytest.mark.fault(30)
    def test_names_survive_a_node_with_another_encoding(self, source: Path, tmp_path: Path) -> None:
        (source / "ü").write_bytes(b"u")
        (tmp_path / "node").mkdir()
        payload = pack_payload(trees=[read_tree(TreeRequest(source, "thäre"))])
        command, first = build_receiver(sys.executable, {**payload.manifest, "dry_run": True})
        done = subprocess.run(
            command,
            input=first,
            cwd=tmp_path / "node",
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            capture_output=True,
            check=True,
        )
        assert b'"ranges": [[0, 2]]' in done.stdout


NAMES = ("../x", "a/../../x", "/etc/x", "a//b", "", ".", "a/.", "a\0b")
LINKS: list[dict[str, str]] = [
    {"x": "/etc"},
    {"x": "y/../../z"},
    {"deep/x": "../../z"},
    {"deep/up": "..", "x": "deep/up/../z"},
    {"x": "y", "y": "x"},
    {"x": "x/../a"},
]
OBJECTS = ("../../x", "0" * 63, "0" * 64 + "/../x", "0" * 64 + "\n")
DESTINATIONS = ("", ".", "/", "a/../../b", ".csdctl", "./.csdctl/objects", "a\0")
OUTSIDE: list[tuple[str, dict[str, Any]]] = [
    *(("points outside", {"directories": [[name, 0o755]]}) for name in NAMES),
    *(("points outside", {"links": [[name, "a"]]}) for name in NAMES),
    *(("points outside", {"files": [[name, 0]], "objects": [["0" * 64, 0, 0o644]]}) for name in NAMES),
    *(("points outside", {"links": list(links.items())}) for links in LINKS),
    *(("not a valid object name", {"objects": [[name, 0, 0o644]]}) for name in OBJECTS),
    *(("destination", {"destination": name}) for name in DESTINATIONS),
]
TREE = {"id": "0" * 32, "destination": "there", "directories": [], "files": [], "links": []}


@pytest.mark.fault(31)
@pytest.mark.first(50)
@pytest.mark.parametrize(("words", "changes"), OUTSIDE)
def test_what_points_outside_is_refused(node: Machine, words: str, changes: dict[str, Any]) -> None:
    """The host refuses such trees, but the receiver does not trust the host."""
    tree = {**TREE, **changes}
    done = receive(node[0], {"objects": tree.pop("objects", []), "trees": [tree], "keep": []})
    assert done.exit_code == 1, done
    assert words in json.loads(done.output.partition(" ")[2])["message"]
    assert not list(node[1].rglob("*"))


@pytest.mark.fault(31)
def test_file_is_not_written_through_a_link(node: Machine, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    wanted = [hash_file(Path("/dev/null")), 0, 0o644]
    tree = {**TREE, "links": [["a", "b"]], "files": [["a/x", 0]]}
    assert receive(node[0], {"objects": [wanted], "trees": [tree], "keep": []}).exit_code == 1
    assert not (node[1] / "there").exists()
    assert not parts(node[1])
