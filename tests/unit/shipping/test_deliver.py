"""Delivery of files and trees to this machine and over SSH, with a real receiver at the other end."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from csdctl.errors import InputError, RemoteCommandError
from csdctl.shipping.deliver import Delivery, build_receiver_command, deliver
from csdctl.shipping.payload import TreeRequest, pack_payload, read_tree
from csdctl.shipping.store import hash_file, store_bytes
from tests.fake_session import FakeSession
from tests.unit.shipping.delivering import (
    Machine,
    content_of,
    fill,
    parts,
    send,
    send_tree,
)

pytestmark = pytest.mark.first(2)


class TestFiles:
    def test_all_files_arrive_at_an_empty_machine(self, machine: Machine, host: Path) -> None:
        session, home = machine
        files = [store_bytes(f"content {number}".encode(), ".bin", host) for number in range(3)]
        assert send(session, *files) == Delivery(3, 27, 0)
        assert [hash_file(home / file.path) for file in files] == [file.sha256 for file in files]
        assert not parts(home)

    def test_only_what_is_missing_is_sent(self, machine: Machine, host: Path) -> None:
        session, home = machine
        files = [store_bytes(f"content {number}".encode(), ".bin", host) for number in range(3)]
        send(session, *files[:2])
        before = (home / files[0].path).stat().st_ino
        assert send(session, *files) == Delivery(1, 9, 2)
        assert send(session, *files) == Delivery(0, 0, 3)
        assert (home / files[0].path).stat().st_ino == before

    def test_empty_file_arrives(self, node: Machine, host: Path) -> None:
        session, home = node
        empty = store_bytes(b"", ".bin", host)
        assert send(session, empty, store_bytes(b"x", "", host)) == Delivery(2, 1, 0)
        assert (home / empty.path).read_bytes() == b""

    @pytest.mark.fault(28)
    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda path: path.write_bytes(b"CONTENT"), id="same size, other bytes"),
            pytest.param(lambda path: path.write_bytes(b"cont"), id="cut short"),
            pytest.param(lambda path: path.write_bytes(b""), id="empty"),
            pytest.param(lambda path: path.unlink(), id="gone"),
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

    def test_empty_delivery_sends_no_command(self) -> None:
        session = FakeSession("csd0")
        assert send(session) == Delivery(0, 0, 0)
        assert session.commands == []

    def test_unchanged_files_take_one_command_and_no_input(self, host: Path) -> None:
        session = FakeSession("csd0").on("sh", stdout="@csdctl-result {}")
        send(session, store_bytes(b"x", "", host))
        assert len(session.commands) == len(session.conversations) == 1
        assert session.conversations[0].sent_bytes == b""
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
        delivery = send_tree(session, source)
        assert delivery.num_present == 0
        there = home / "there"
        assert content_of(there) == content_of(source)
        for name in ("a", "run", "secret", "deep", "empty/directory"):
            assert (there / name).stat().st_mode == (source / name).stat().st_mode
        assert os.readlink(there / "link") == "deep/b"
        assert (there / "deep" / "up").read_bytes() == b"one"
        assert send_tree(session, source).num_sent == 0

    def test_same_content_is_sent_once(self, node: Machine, source: Path) -> None:
        assert send_tree(node[0], source) == Delivery(2, 6, 0)

    def test_changed_tree_replaces_the_old_one_atomically(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source)
        before = os.readlink(home / "there")
        (source / "a").write_bytes(b"changed")
        (source / "deep" / "b").unlink()
        assert send_tree(session, source) == Delivery(1, 7, 1)
        assert content_of(home / "there") == {"a": b"changed", "deep/c": b"one"}
        assert content_of(Path(before)) == {"a": b"one", "deep/b": b"two", "deep/c": b"one"}

    def test_unchanged_tree_is_not_built_again(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source)
        before = os.readlink(home / "there")
        send_tree(session, source)
        assert os.readlink(home / "there") == before

    @pytest.mark.fault(28)
    def test_changed_bytes_in_a_deployed_tree_are_repaired(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source)
        (home / "there" / "deep" / "b").write_bytes(b"TWO")
        assert send_tree(session, source) == Delivery(1, 3, 1)
        assert (home / "there" / "deep" / "b").read_bytes() == b"two"

    def test_file_added_on_the_node_is_not_a_change(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source)
        (home / "there" / "cache").write_bytes(b"of the node")
        assert send_tree(session, source).num_sent == 0
        assert (home / "there" / "cache").exists()

    def test_reader_never_sees_a_partial_tree(self, node: Machine, source: Path) -> None:
        session, home = node
        for name in "abcdefgh":
            (source / name).write_bytes(b"old")
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
            for name in "abcdefgh":
                (source / name).write_bytes(b"new %d" % number)
            send_tree(session, source)
        stopping.set()
        reader.join()
        assert all(len(contents) == 1 for contents in seen)

    def test_long_manifest_is_sent_once(self, node: Machine, source: Path) -> None:
        session, home = node
        for number in range(60):
            (source / f"file {number}").write_bytes(b"%d" % number)
        assert send_tree(session, source).num_sent == 62
        assert len(list((home / ".csdctl" / "manifests").iterdir())) == 1
        assert send_tree(session, source) == Delivery(0, 0, 62)

    def test_damaged_manifest_of_the_node_is_requested_again(self, node: Machine, source: Path) -> None:
        session, home = node
        for number in range(60):
            (source / f"file {number}").write_bytes(b"%d" % number)
        send_tree(session, source)
        next((home / ".csdctl" / "manifests").iterdir()).write_bytes(b"nonsense")
        assert send_tree(session, source).num_sent == 0

    def test_two_trees_are_sent_together(self, node: Machine, source: Path, host: Path) -> None:
        session, home = node
        other = fill(host / "other", a=b"one", z=b"zzz")
        requests = [TreeRequest(source, "first"), TreeRequest(other, "deep/second")]
        payload = pack_payload(trees=[read_tree(request) for request in requests])
        assert deliver(session, payload) == Delivery(3, 9, 0)
        assert content_of(home / "first") == content_of(source)
        assert content_of(home / "deep" / "second") == content_of(other)

    def test_overlapping_trees_are_refused(self, source: Path) -> None:
        trees = [read_tree(TreeRequest(source, name)) for name in ("a/b", "a")]
        with pytest.raises(InputError, match="overlap"):
            pack_payload(trees=trees)

    def test_dry_run_reports_and_writes_nothing(self, machine: Machine, source: Path) -> None:
        session, home = machine
        before = set(home.rglob("*"))
        assert send_tree(session, source, dry_run=True) == Delivery(2, 6, 0)
        assert set(home.rglob("*")) == before

    def test_absolute_destination_is_accepted(self, node: Machine, source: Path, tmp_path: Path) -> None:
        send_tree(node[0], source, str(tmp_path / "srv" / "data"))
        assert content_of(tmp_path / "srv" / "data") == content_of(source)

    def test_empty_directory_at_the_destination_is_replaced(self, node: Machine, source: Path) -> None:
        (node[1] / "there").mkdir()
        send_tree(node[0], source)
        assert content_of(node[1] / "there") == content_of(source)

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

    def test_tree_inside_a_deployed_tree_is_refused(self, node: Machine, source: Path) -> None:
        send_tree(node[0], source)
        with pytest.raises(InputError, match="inside another tree"):
            send_tree(node[0], source, "there/inside")

    def test_file_system_without_hard_links_gets_copies(self, node: Machine, source: Path) -> None:
        session, home = node
        request = pack_payload(trees=[read_tree(TreeRequest(source, "there"))])
        send_tree(session, source, "elsewhere")  # so that the objects are there
        command = build_receiver_command(sys.executable, request.build_request())
        position = command.index("-c", 5) + 1
        command[position] = (
            "import os,errno\ndef link(*_): raise OSError(errno.EMLINK,'')\nos.link=link\n"
            + (command[position])
        )
        assert session.run(command).exit_code == 0
        assert content_of(home / "there") == content_of(source)
        assert (home / "there" / "a").stat().st_nlink == 1

    @pytest.mark.fault(32)
    def test_ten_thousand_small_files_arrive_and_are_recognized_afterwards(
        self, node: Machine, tmp_path: Path
    ) -> None:
        source = tmp_path / "many"
        for number in range(10_000):
            path = source / f"{number % 100:02d}" / f"{number}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"%d" % number)
        assert send_tree(node[0], source).num_sent == 10_000
        assert content_of(node[1] / "there") == content_of(source)
        assert send_tree(node[0], source) == Delivery(0, 0, 10_000)
        (source / "07" / "7.bin").write_bytes(b"changed")
        assert send_tree(node[0], source) == Delivery(1, 7, 9_999)
