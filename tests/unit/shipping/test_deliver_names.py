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


class TestNothingOutside:
    """The host refuses such trees, but the receiver does not trust the host."""

    def refuse(self, node: Machine, **changes: Any) -> str:
        tree = {"id": "0" * 32, "destination": "there", "directories": [], "files": [], "links": []}
        manifest = {"objects": changes.pop("objects", []), "trees": [{**tree, **changes}], "keep": []}
        done = receive(node[0], manifest)
        assert done.exit_code == 1, done
        assert not list(node[1].rglob("*"))
        return str(json.loads(done.output.partition(" ")[2])["message"])

    @pytest.mark.fault(31)
    @pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "a//b", "", ".", "a/.", "a\0b"])
    def test_names_pointing_outside_are_refused(self, node: Machine, name: str) -> None:
        assert "points outside" in self.refuse(node, directories=[[name, 0o755]])
        assert "points outside" in self.refuse(node, links=[[name, "a"]])
        assert "points outside" in self.refuse(node, files=[[name, 0]], objects=[["0" * 64, 0, 0o644]])

    @pytest.mark.fault(31)
    @pytest.mark.parametrize(
        "links",
        [
            {"x": "/etc"},
            {"x": "y/../../z"},
            {"deep/x": "../../z"},
            {"deep/up": "..", "x": "deep/up/../z"},
            {"x": "y", "y": "x"},
            {"x": "x/../a"},
        ],
    )
    def test_symbolic_links_pointing_outside_are_refused(self, node: Machine, links: dict[str, str]) -> None:
        assert "points outside" in self.refuse(node, links=list(links.items()))

    @pytest.mark.fault(31)
    @pytest.mark.parametrize("name", ["../../x", "0" * 63, "0" * 64 + "/../x", "0" * 64 + "\n"])
    def test_objects_outside_the_store_are_refused(self, node: Machine, name: str) -> None:
        assert "not a valid object name" in self.refuse(node, objects=[[name, 0, 0o644]])

    @pytest.mark.fault(31)
    @pytest.mark.parametrize("name", ["", ".", "/", "a/../../b", ".csdctl", "./.csdctl/objects", "a\0"])
    def test_invalid_destinations_are_refused(self, node: Machine, name: str) -> None:
        assert "destination" in self.refuse(node, destination=name)

    @pytest.mark.fault(31)
    def test_file_is_not_written_through_a_link(self, node: Machine, tmp_path: Path) -> None:
        (tmp_path / "victim").mkdir()
        tree = {"id": "0" * 32, "destination": "there", "directories": [], "links": [["a", "b"]]}
        wanted = [hash_file(Path("/dev/null")), 0, 0o644]
        manifest = {"objects": [wanted], "trees": [{**tree, "files": [["a/x", 0]]}], "keep": []}
        assert receive(node[0], manifest).exit_code == 1
        assert not (node[1] / "there").exists()
        assert not parts(node[1])
