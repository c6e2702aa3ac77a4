"""Delivery of files and trees to this machine and over SSH, with a real receiver at the other end."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from csdctl.errors import InputError, RemoteCommandError
from csdctl.launch.leftovers import CleanupOptions, clean_machine
from csdctl.shipping.deliver import Delivery, build_receiver, deliver
from csdctl.shipping.payload import TreeRequest, pack_payload, read_tree
from csdctl.shipping.store import OBJECTS, hash_file, store_bytes
from tests.fake_session import FakeSession
from tests.unit.shipping.delivering import Machine, content_of, fill, parts, send, send_tree

pytestmark = pytest.mark.first(2)


class TestFiles:
    def test_missing_files_arrive_and_others_are_not_sent(self, machine: Machine, host: Path) -> None:
        session, home = machine
        files = [store_bytes(content, ".bin", host) for content in (b"content 0", b"content 1", b"")]
        assert send(session, *files[:2]) == Delivery(2, 18, 0)
        before = (home / files[0].path).stat().st_ino
        assert send(session, *files) == Delivery(1, 0, 2)
        assert send(session, *files) == Delivery(0, 0, 3)
        assert [hash_file(home / file.path) for file in files] == [file.sha256 for file in files]
        assert (home / files[0].path).stat().st_ino == before
        assert not parts(home)

    @pytest.mark.fault(28)
    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda path: path.write_bytes(b"CONTENT"), id="same size, other bytes"),
            pytest.param(lambda path: path.write_bytes(b"cont"), id="cut short"),
            pytest.param(lambda path: path.chmod(0o644), id="other permissions"),
            pytest.param(lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), id="a link"),
        ],
    )
    def test_damaged_file_is_found_and_replaced(
        self, node: Machine, host: Path, damage: Callable[[Path], object]
    ) -> None:
        session, home = node
        stored = store_bytes(b"content", ".bin", host)
        send(session, stored)
        damage(home / stored.path)
        assert send(session, stored).num_sent == 1
        assert (home / stored.path).read_bytes() == b"content"
        assert not (home / stored.path).is_symlink()

    def test_unchanged_files_take_one_command_and_no_files_take_none(self, host: Path) -> None:
        session = FakeSession("csd0").on("sh", stdout="@csdctl-result {}")
        assert send(session) == Delivery(0, 0, 0)
        send(session, store_bytes(b"x", "", host))
        assert len(session.commands) == 1
        assert session.conversations[0].is_closed

    def test_missing_python_is_an_error_with_the_required_version(self, host: Path) -> None:
        session = FakeSession("csd4").on("sh", exit_code=127, stderr="python3: not found")
        with pytest.raises(RemoteCommandError, match="not found") as raised:
            send(session, store_bytes(b"x", "", host))
        assert (raised.value.node, "Python (3.8" in raised.value.remedy) == ("csd4", True)

    def test_python3_is_used_where_the_nodes_python_is_missing(self, node: Machine, host: Path) -> None:
        assert send(node[0], store_bytes(b"x", "", host), python="/opt/none/bin/python").num_sent == 1


class TestTrees:
    def test_tree_arrives_unchanged(self, machine: Machine, source: Path) -> None:
        session, home = machine
        (source / "empty" / "directory").mkdir(parents=True)
        (source / ".hidden").write_bytes(b"hidden")
        (source / "run").write_bytes(b"one")
        (source / "run").chmod(0o755)
        (source / "secret").write_bytes(b"key")
        (source / "secret").chmod(0o600)
        (source / "link").symlink_to("deep/b")
        (source / "deep" / "up").symlink_to("../a")
        assert send_tree(session, source).num_present == 0
        there = home / "there"
        assert content_of(there) == content_of(source)
        for name in ("a", "run", "secret", "deep", "empty/directory"):
            assert (there / name).stat().st_mode == (source / name).stat().st_mode
        assert os.readlink(there / "link") == "deep/b"
        assert (there / "deep" / "up").read_bytes() == b"one"
        assert send_tree(session, source).num_sent == 0

    def test_only_a_changed_tree_is_built_again_beside_the_old_one(self, node: Machine, source: Path) -> None:
        session, home = node
        assert send_tree(session, source) == Delivery(2, 6, 0), "equal files are sent once"
        before = os.readlink(home / "there")
        (home / "there" / "cache").write_bytes(b"of the node")
        assert send_tree(session, source).num_sent == 0
        assert os.readlink(home / "there") == before
        (source / "a").write_bytes(b"changed")
        (source / "deep" / "b").unlink()
        assert send_tree(session, source) == Delivery(1, 7, 1)
        assert content_of(home / "there") == {"a": b"changed", "deep/c": b"one"}
        assert content_of(Path(before))["a"] == b"one"

    def test_reader_never_sees_a_partial_tree(self, node: Machine, source: Path) -> None:
        session, home = node
        fill(source, **dict.fromkeys("abcdefgh", b"old"))
        send_tree(session, source)
        seen: set[frozenset[bytes]] = set()
        stopping = threading.Event()

        def read() -> None:
            while not stopping.is_set():
                directory = os.readlink(home / "there")
                seen.add(frozenset(Path(directory, name).read_bytes() for name in "abcdefgh"))

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(5):
            fill(source, **dict.fromkeys("abcdefgh", b"new %d" % number))
            send_tree(session, source)
        stopping.set()
        reader.join()
        assert all(len(contents) == 1 for contents in seen)

    def test_two_trees_are_sent_together_unless_one_is_in_the_other(
        self, node: Machine, source: Path, host: Path
    ) -> None:
        session, home = node
        other = fill(host / "other", a=b"one", z=b"zzz")
        requests = [TreeRequest(source, "first"), TreeRequest(other, "deep/second")]
        payload = pack_payload(trees=[read_tree(request) for request in requests])
        assert deliver(session, payload) == Delivery(3, 9, 0)
        assert content_of(home / "first") == content_of(source)
        assert content_of(home / "deep" / "second") == content_of(other)
        with pytest.raises(InputError, match="overlap"):
            pack_payload(trees=[read_tree(TreeRequest(source, name)) for name in ("a/b", "a")])
        with pytest.raises(InputError, match="inside another tree"):
            send_tree(session, source, "first/inside")

    def test_dry_run_reports_and_writes_nothing(self, machine: Machine, source: Path) -> None:
        session, home = machine
        before = set(home.rglob("*"))
        assert send_tree(session, source, dry_run=True) == Delivery(2, 6, 0)
        assert set(home.rglob("*")) == before

    def test_destination_may_be_absolute_and_an_empty_directory(
        self, node: Machine, source: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "srv" / "data").mkdir(parents=True)
        send_tree(node[0], source, str(tmp_path / "srv" / "data"))
        assert content_of(tmp_path / "srv" / "data") == content_of(source)

    @pytest.mark.parametrize("what", ["directory", "file", "link", "dangling link"])
    def test_foreign_destination_is_refused_and_unchanged(
        self, node: Machine, source: Path, what: str, tmp_path: Path
    ) -> None:
        session, home = node
        there = home / "there"
        if what == "directory":
            fill(there, precious=b"data")
        elif what == "file":
            there.write_bytes(b"data")
        else:
            there.symlink_to(tmp_path if what == "link" else "nowhere")
        before = (there.lstat().st_ino, there.lstat().st_mtime_ns)
        with pytest.raises(InputError, match="was not created by `csdctl deploy`") as raised:
            send_tree(session, source)
        assert raised.value.node == "csd0"
        assert (there.lstat().st_ino, there.lstat().st_mtime_ns) == before
        assert not (home / ".csdctl").exists()

    def test_file_system_without_hard_links_gets_copies(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source, "elsewhere")  # so that the objects are there
        payload = pack_payload(trees=[read_tree(TreeRequest(source, "there"))])
        command, first = build_receiver(sys.executable, payload.manifest)
        position = command.index("-c", 5) + 1
        command[position] = (
            "import os,errno\ndef link(*_): raise OSError(errno.EMLINK,'')\nos.link=link\n"
            + (command[position])
        )
        assert session.run(command, stdin=first).exit_code == 0
        assert content_of(home / "there") == content_of(source)
        assert (home / "there" / "a").stat().st_nlink == 1

    def test_what_no_tree_uses_is_pruned(self, node: Machine, source: Path, host: Path) -> None:
        session, home = node
        send_tree(session, source)
        (source / "a").write_bytes(b"changed")
        send_tree(session, source)
        stored = store_bytes(b"worker", ".pyz", host)
        send(session, stored)
        (home / f"{stored.path}.part").write_bytes(b"part")
        pruning = CleanupOptions(is_pruning=True)
        assert clean_machine(session, sys.executable, pruning).num_unused == 3
        assert content_of(home / "there") == content_of(source)
        assert send_tree(session, source).num_sent == 0
        assert not (home / stored.path).exists()
        assert not parts(home)
        (home / "there").unlink()
        for _ in range(2):  # first the tree, then its objects
            clean_machine(session, sys.executable, pruning)
        assert not [*(home / ".csdctl" / "trees").iterdir(), *(home / OBJECTS).iterdir()]
