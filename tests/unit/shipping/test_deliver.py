"""Files and trees on their way to a machine: this one and one over SSH, with a real receiver on it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import CsdctlError, InputError, NodeError, RemoteCommandError, UnreachableError
from csdctl.shipping import chunks as chunks_module
from csdctl.shipping.chunks import CHUNK_BYTES, SharedChunks
from csdctl.shipping.deliver import Delivery, DeliveryProgress, deliver
from csdctl.shipping.parcel import Parcel, pack_parcel
from csdctl.shipping.receiver import build_receiver_command
from csdctl.shipping.store import OBJECTS, StoredFile, hash_file, store_bytes
from csdctl.shipping.tree import TreeRequest, read_tree
from csdctl.transport.fake import FakeSession
from csdctl.transport.local import LocalSession
from csdctl.transport.ssh import connect

Machine = tuple[Any, Path]

NASTY_NAMES = [
    "with space",
    "semi;colon",
    "$(touch pwned)",
    "`touch pwned`",
    "new\nline",
    "-rf",
    "--help",
    "quote'quote\"quote",
    "*",
    "back\\slash",
    "ü€",
    "~",
    os.fsdecode(b"not utf-8 \xff\xfe"),
]


def send(session: Any, *files: StoredFile, **options: Any) -> Delivery:
    return deliver(session, pack_parcel([file.as_object() for file in files]), SharedChunks(), **options)


def send_tree(session: Any, source: Path, destination: str = "there", **options: Any) -> Delivery:
    chunks = SharedChunks()
    parcel = pack_parcel(trees=[read_tree(TreeRequest(source, destination), chunks)])
    return deliver(session, parcel, chunks, **options)


def content_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def parts(home: Path) -> list[Path]:
    return [*home.rglob("*.part"), *(home / ".csdctl").rglob(".part-*")]


def fill(directory: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "of-host"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "of-host" / "tree", a=b"one", deep__b=b"two", deep__c=b"one")


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    (tmp_path / "node").mkdir()
    return LocalSession("csd0", tmp_path / "node"), tmp_path / "node"


@contextmanager
def file_system(place: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory, mounted at `place`."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield place
    finally:
        # It goes when nobody uses it: what a session has just ended may take a moment to be gone.
        subprocess.run(["umount", "--lazy", place], check=True)


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
            pytest.param(lambda path: path.chmod(0o600), id="other permissions"),
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

    def test_nothing_to_deliver_asks_the_machine_nothing(self) -> None:
        session = FakeSession("csd0")
        assert send(session) == Delivery(0, 0, 0)
        assert session.commands == []

    def test_unchanged_files_take_one_command_and_no_input(self, host: Path) -> None:
        session = FakeSession("csd0").on("sh", stdout=json.dumps({"done": {}}))
        send(session, store_bytes(b"x", "", host))
        assert len(session.commands) == len(session.conversations) == 1
        assert session.conversations[0].sent_bytes == b""
        assert session.conversations[0].is_closed

    def test_machine_without_python_is_told_what_it_needs(self, host: Path) -> None:
        session = FakeSession("csd4").on("sh", exit_code=127, stderr="python3: not found")
        with pytest.raises(RemoteCommandError, match="not found") as raised:
            send(session, store_bytes(b"x", "", host))
        assert (raised.value.node, "Python 3.8" in raised.value.remedy) == ("csd4", True)

    def test_unreadable_answer_is_an_error_of_the_node(self, host: Path) -> None:
        session = FakeSession("csd4").on("sh", stdout="Welcome!\n")
        with pytest.raises(RemoteCommandError, match="unreadable answer 'Welcome!'"):
            send(session, store_bytes(b"x", "", host))

    def test_another_python_does_where_the_nodes_own_is_not_there_yet(
        self, node: Machine, host: Path
    ) -> None:
        assert send(node[0], store_bytes(b"x", "", host), python="/opt/none/bin/python").num_sent == 1


class TestTrees:
    def test_tree_arrives_as_it_is(self, machine: Machine, source: Path) -> None:
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

    def test_changed_tree_replaces_the_old_one_at_once(self, node: Machine, source: Path) -> None:
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
    def test_changed_bytes_in_a_deployed_tree_are_mended(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source)
        (home / "there" / "deep" / "b").write_bytes(b"TWO")
        assert send_tree(session, source) == Delivery(1, 3, 1)
        assert (home / "there" / "deep" / "b").read_bytes() == b"two"

    def test_file_that_was_added_on_the_node_is_no_change(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source)
        (home / "there" / "cache").write_bytes(b"of the node")
        assert send_tree(session, source).num_sent == 0
        assert (home / "there" / "cache").exists()

    def test_reader_never_sees_half_a_tree(self, node: Machine, source: Path) -> None:
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

    def test_damaged_manifest_of_the_node_is_asked_for_again(self, node: Machine, source: Path) -> None:
        session, home = node
        for number in range(60):
            (source / f"file {number}").write_bytes(b"%d" % number)
        send_tree(session, source)
        next((home / ".csdctl" / "manifests").iterdir()).write_bytes(b"nonsense")
        assert send_tree(session, source).num_sent == 0

    def test_two_trees_travel_together(self, node: Machine, source: Path, host: Path) -> None:
        session, home = node
        other = fill(host / "other", a=b"one", z=b"zzz")
        chunks = SharedChunks()
        requests = [TreeRequest(source, "first"), TreeRequest(other, "deep/second")]
        parcel = pack_parcel(trees=[read_tree(request, chunks) for request in requests])
        assert deliver(session, parcel, chunks) == Delivery(3, 9, 0)
        assert content_of(home / "first") == content_of(source)
        assert content_of(home / "deep" / "second") == content_of(other)

    def test_trees_inside_each_other_are_refused(self, source: Path) -> None:
        chunks = SharedChunks()
        trees = [read_tree(TreeRequest(source, name), chunks) for name in ("a/b", "a")]
        with pytest.raises(InputError, match="lie in each other"):
            pack_parcel(trees=trees)

    def test_dry_run_tells_and_writes_nothing(self, machine: Machine, source: Path) -> None:
        session, home = machine
        before = set(home.rglob("*"))
        assert send_tree(session, source, dry_run=True) == Delivery(2, 6, 0)
        assert set(home.rglob("*")) == before

    def test_absolute_destination_is_taken(self, node: Machine, source: Path, tmp_path: Path) -> None:
        send_tree(node[0], source, str(tmp_path / "srv" / "data"))
        assert content_of(tmp_path / "srv" / "data") == content_of(source)

    def test_empty_directory_at_the_destination_gives_way(self, node: Machine, source: Path) -> None:
        (node[1] / "there").mkdir()
        send_tree(node[0], source)
        assert content_of(node[1] / "there") == content_of(source)

    @pytest.mark.parametrize("what", ["directory", "file", "link", "dangling link"])
    def test_what_others_made_is_refused_and_left_alone(
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
        with pytest.raises(InputError, match="was not made by `csdctl deploy`") as raised:
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
        request = pack_parcel(trees=[read_tree(TreeRequest(source, "there"), SharedChunks())])
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
    def test_ten_thousand_small_files_arrive_and_are_known_afterwards(
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


class TestNames:
    @pytest.mark.fault(30)
    @pytest.mark.parametrize("name", NASTY_NAMES)
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
    def test_destination_with_a_leading_dash_arrives(self, node: Machine, source: Path) -> None:
        send_tree(node[0], source, "-rf")
        assert content_of(node[1] / "-rf") == content_of(source)

    @pytest.mark.fault(30)
    def test_names_survive_a_node_with_another_encoding(self, source: Path, tmp_path: Path) -> None:
        (source / "ü").write_bytes(b"u")
        (tmp_path / "node").mkdir()
        parcel = pack_parcel(trees=[read_tree(TreeRequest(source, "thäre"), SharedChunks())])
        command = build_receiver_command(sys.executable, parcel.build_request(dry_run=True))
        done = subprocess.run(
            command,
            cwd=tmp_path / "node",
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            capture_output=True,
            check=True,
        )
        assert b'"missing": [[0, 2]]' in done.stdout


class TestNothingLeadsOut:
    """The host refuses such trees; a receiver trusts no host."""

    def refuse(self, node: Machine, **changes: Any) -> str:
        tree = {"id": "0" * 32, "destination": "there", "directories": [], "files": [], "links": []}
        manifest = {"objects": changes.pop("objects", []), "trees": [{**tree, **changes}], "keep": []}
        command = build_receiver_command(sys.executable, json.dumps({"manifest": manifest}))
        done = node[0].run(command)
        assert done.exit_code == 2, done
        assert not list(node[1].rglob("*"))
        return str(json.loads(done.output)["refused"])

    @pytest.mark.fault(31)
    @pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "a//b", "", ".", "..", "a/.", "a\0b"])
    def test_names_that_lead_out_are_refused(self, node: Machine, name: str) -> None:
        assert "leads out" in self.refuse(node, directories=[[name, 0o755]])
        assert "leads out" in self.refuse(node, links=[[name, "a"]])
        wanted = ["0" * 64, "0" * 64, 0, 0o644]
        assert "leads out" in self.refuse(node, files=[[name, 0]], objects=[wanted])

    @pytest.mark.fault(31)
    @pytest.mark.parametrize(
        "links",
        [
            {"x": "/etc"},
            {"x": "../y"},
            {"x": "y/../../z"},
            {"deep/x": "../../z"},
            {"deep/up": "..", "x": "deep/up/../z"},
            {"x": "y", "y": "x"},
            {"x": "x/../a"},
        ],
    )
    def test_symbolic_links_that_lead_out_are_refused(self, node: Machine, links: dict[str, str]) -> None:
        assert "leads out" in self.refuse(node, links=list(links.items()))

    @pytest.mark.fault(31)
    @pytest.mark.parametrize("name", ["../../x", "0" * 63, "0" * 64 + "/../x", "0" * 64 + "\n", "1" * 64])
    def test_objects_outside_the_store_are_refused(self, node: Machine, name: str) -> None:
        assert "not the name" in self.refuse(node, objects=[[name, "0" * 64, 0, 0o644]])

    @pytest.mark.fault(31)
    @pytest.mark.parametrize(
        "name", ["", ".", "/", "../there", "a/../../b", ".csdctl", "./.csdctl/objects", "a\0"]
    )
    def test_destinations_that_no_tree_may_have_are_refused(self, node: Machine, name: str) -> None:
        assert "destination" in self.refuse(node, destination=name)

    @pytest.mark.fault(31)
    def test_file_by_way_of_a_link_is_not_written(self, node: Machine, tmp_path: Path) -> None:
        (tmp_path / "victim").mkdir()
        tree = {"id": "0" * 32, "destination": "there", "directories": [], "links": [["a", "b"]]}
        wanted = [hash_file(Path("/dev/null")), hash_file(Path("/dev/null")), 0, 0o644]
        manifest = {"objects": [wanted], "trees": [{**tree, "files": [["a/x", 0]]}], "keep": []}
        done = node[0].run(build_receiver_command(sys.executable, json.dumps({"manifest": manifest})))
        assert done.exit_code == 1
        assert not (node[1] / "there").exists()
        assert not parts(node[1])


class TestFaults:
    @pytest.mark.fault(25)
    @pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root only")
    def test_full_disk_is_said_and_leaves_old_files_and_no_part(self, source: Path, tmp_path: Path) -> None:
        with file_system(tmp_path / "node", "size=2m") as home:
            session = LocalSession("csd0", home)
            send_tree(session, source)
            (source / "a").write_bytes(b"new")
            (source / "big").write_bytes(os.urandom(4_000_000))
            with pytest.raises(RemoteCommandError, match="No space left on device") as raised:
                send_tree(session, source)
            assert (raised.value.node, "df -h" in raised.value.remedy) == ("csd0", True)
            assert (home / "there" / "a").read_bytes() == b"one"
            assert not parts(home)

    @pytest.mark.fault(25)
    @pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root only")
    def test_disk_that_is_full_for_the_tree_itself_leaves_the_old_one(
        self, source: Path, tmp_path: Path
    ) -> None:
        with file_system(tmp_path / "node", "nr_inodes=40") as home:
            session = LocalSession("csd0", home)
            send_tree(session, source)
            for number in range(60):
                (source / f"empty {number}").mkdir()
            with pytest.raises(RemoteCommandError, match="No space left on device"):
                send_tree(session, source)
            assert not (home / "there" / "empty 0").exists()
            assert (home / "there" / "a").read_bytes() == b"one"
            assert not parts(home)

    @pytest.mark.fault(26)
    @pytest.mark.skipif(os.geteuid() != 0, reason="mounted by root only")
    def test_read_only_file_system_is_said_and_what_is_there_is_still_found(
        self, source: Path, tmp_path: Path
    ) -> None:
        with file_system(tmp_path / "node", "rw") as home:
            session = LocalSession("csd0", home)
            send_tree(session, source)
            subprocess.run(["mount", "-o", "remount,ro", home], check=True)
            assert send_tree(session, source).num_sent == 0
            (source / "a").write_bytes(b"new")
            with pytest.raises(RemoteCommandError, match="Read-only file system") as raised:
                send_tree(session, source)
            assert "read-only" in raised.value.remedy
            assert (home / "there" / "a").read_bytes() == b"one"

    @pytest.mark.fault(25)
    def test_write_error_in_the_middle_keeps_the_old_tree(self, server: Any, source: Path) -> None:
        session = connect(server.node(), [server.known_hosts])
        send_tree(session, source)
        session.close()
        server.shell_prefix = "trap '' XFSZ; ulimit -f 8"
        (source / "a").write_bytes(bytes(500_000))
        session = connect(server.node(), [server.known_hosts])
        with pytest.raises(RemoteCommandError, match="File too large"):
            send_tree(session, source)
        session.close()
        assert (server.home / "there" / "a").read_bytes() == b"one"
        assert len(os.listdir(server.home / OBJECTS)) == len(parts(server.home)) + 2

    @pytest.mark.fault(27)
    def test_cut_at_half_leaves_a_part_that_the_next_deploy_continues(
        self, server: Any, source: Path
    ) -> None:
        size = 64_000_000
        (source / "big").write_bytes(os.urandom(1000) * (size // 1000))

        def cut(progress: DeliveryProgress) -> None:
            if progress.bytes_sent > size // 2:
                server.drop_connections()

        session = connect(server.node(), [server.known_hosts])
        with pytest.raises(UnreachableError):
            send_tree(session, source, on_progress=cut)
        session.close()
        assert not (server.home / "there").exists()
        (part,) = [path for path in parts(server.home) if path.stat().st_size > 1000]
        session = connect(server.node(), [server.known_hosts])
        delivery = send_tree(session, source)
        session.close()
        assert 0 < delivery.bytes_sent < size
        assert content_of(server.home / "there") == content_of(source)
        assert not part.exists()

    @pytest.mark.fault(27)
    def test_part_with_a_wrong_beginning_is_found_and_sent_anew(self, node: Machine, host: Path) -> None:
        session, home = node
        stored = store_bytes(os.urandom(5_000_000), ".bin", host)
        (home / OBJECTS).mkdir(parents=True)
        (home / f"{stored.path}.part").write_bytes(bytes(3_000_000))
        assert send(session, stored) == Delivery(1, 7_000_000, 0)
        assert hash_file(home / stored.path) == stored.sha256
        assert not parts(home)

    @pytest.mark.fault(27)
    def test_part_that_is_complete_is_not_sent_again(self, node: Machine, host: Path) -> None:
        session, home = node
        stored = store_bytes(os.urandom(5_000), ".bin", host)
        (home / OBJECTS).mkdir(parents=True)
        shutil.copy(stored.source, home / f"{stored.path}.part")
        assert send(session, stored) == Delivery(0, 0, 1)
        assert hash_file(home / stored.path) == stored.sha256

    @pytest.mark.fault(29)
    @pytest.mark.parametrize("change", ["other bytes", "cut short", "gone", "same size and time"])
    def test_source_that_changes_meanwhile_is_named_and_nothing_appears(
        self, node: Machine, source: Path, change: str
    ) -> None:
        session, home = node
        send_tree(session, source)
        big = source / "big"
        big.write_bytes(os.urandom(1_000_000))
        chunks = SharedChunks(max_bytes=0)
        parcel = pack_parcel(trees=[read_tree(TreeRequest(source, "there"), chunks)])
        times = big.stat()
        if change == "gone":
            big.unlink()
        else:
            big.write_bytes(os.urandom(10 if change == "cut short" else 1_000_000))
        if change == "same size and time":
            os.utime(big, ns=(times.st_atime_ns, times.st_mtime_ns))
        words = "cannot be read" if change == "gone" else "changed while it was being deployed"
        with pytest.raises(InputError, match=f"{source}/big {words}"):
            deliver(session, parcel, chunks)
        assert not (home / "there" / "big").exists()
        assert (home / "there" / "a").read_bytes() == b"one"

    def test_file_that_arrives_damaged_twice_is_an_error_of_the_node(self, node: Machine, host: Path) -> None:
        stored = store_bytes(b"right", ".bin", host)
        parcel = pack_parcel([stored.as_object()])

        class Damaging(SharedChunks):
            def read(self, source: Any, start: int) -> bytes:
                return b"wrong"

        with pytest.raises(NodeError, match="1 of 1 files arrived damaged") as raised:
            deliver(node[0], parcel, Damaging())
        assert raised.value.node == "csd0"
        assert not (node[1] / stored.path).exists()

    @pytest.mark.fault(33)
    def test_times_of_the_node_mean_nothing(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source)
        for path in (home / "there").rglob("*"):
            os.utime(path, (0, 2**32))
        assert send_tree(session, source).num_sent == 0
        (home / "there" / "a").write_bytes(b"ONE")
        os.utime(home / "there" / "a", (2**32, 2**32))
        assert send_tree(session, source).num_sent == 1

    def test_killed_receiver_is_an_error_and_the_next_one_goes_on(self, node: Machine, host: Path) -> None:
        session, home = node
        stored = store_bytes(os.urandom(8_000_000), ".bin", host)

        def kill(progress: DeliveryProgress) -> None:
            if progress.bytes_sent > 4_000_000:
                session.close()

        with pytest.raises(CsdctlError):
            send(session, stored, on_progress=kill)
        assert send(LocalSession("csd0", home), stored).num_sent == 1
        assert hash_file(home / stored.path) == stored.sha256

    def test_two_deploys_to_one_home_take_turns(self, node: Machine, source: Path) -> None:
        _, home = node
        (source / "big").write_bytes(os.urandom(3_000_000))
        deliveries: list[Delivery] = []
        threads = [
            threading.Thread(target=lambda: deliveries.append(send_tree(LocalSession("csd0", home), source)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(delivery.num_sent for delivery in deliveries) == 3
        assert content_of(home / "there") == content_of(source)
        assert len([p for p in (home / ".csdctl" / "trees").iterdir() if p.is_dir()]) == 1


class TestSharedReading:
    def test_host_is_read_once_for_many_nodes(self, tmp_path: Path) -> None:
        source = fill(tmp_path / "tree", big=os.urandom(5 * CHUNK_BYTES + 17), small=b"small")
        total = 5 * CHUNK_BYTES + 22
        chunks = SharedChunks()
        parcel = pack_parcel(trees=[read_tree(TreeRequest(source, "there"), chunks)])
        self.deliver_to(4, parcel, chunks, tmp_path)
        assert chunks.bytes_read == total

    def test_more_than_the_cache_holds_is_read_once_more(self, tmp_path: Path) -> None:
        content = os.urandom(6 * CHUNK_BYTES)
        source = fill(tmp_path / "tree", big=content)
        chunks = SharedChunks(max_bytes=2 * CHUNK_BYTES)
        parcel = pack_parcel(trees=[read_tree(TreeRequest(source, "there"), chunks)])
        self.deliver_to(1, parcel, chunks, tmp_path)
        assert chunks.bytes_read == len(content) + 4 * CHUNK_BYTES

    def test_chunk_that_cannot_be_read_fails_for_all_that_wait(self, tmp_path: Path) -> None:
        source = fill(tmp_path / "tree", a=b"x")
        chunks = SharedChunks(max_bytes=0)
        found = chunks.hash_source(str(source / "a"))
        (source / "a").unlink()
        for _ in range(2):
            with pytest.raises(InputError, match="cannot be read"):
                chunks.read(found, 0)

    @staticmethod
    def deliver_to(num_nodes: int, parcel: Parcel, chunks: SharedChunks, directory: Path) -> None:
        def send_one(home: Path) -> None:
            deliver(LocalSession(home.name, home), parcel, chunks)

        homes = [directory / f"node{number}" for number in range(num_nodes)]
        threads = [threading.Thread(target=send_one, args=(home,)) for home in homes]
        for home in homes:
            home.mkdir()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all((home / "there").is_dir() for home in homes)


class TestPruning:
    def test_what_nothing_uses_is_removed(self, node: Machine, source: Path, host: Path) -> None:
        session, home = node
        send_tree(session, source)
        (source / "a").write_bytes(b"changed")
        send_tree(session, source)
        stored = store_bytes(b"worker", ".pyz", host)
        send(session, stored)
        (home / f"{stored.path}.part").write_bytes(b"part")
        done = session.run(build_receiver_command(sys.executable, '{"prune": true}'))
        assert json.loads(done.output)["done"]["num_removed"] > 0
        assert content_of(home / "there") == content_of(source)
        assert send_tree(session, source).num_sent == 0
        assert len([p for p in (home / ".csdctl" / "trees").iterdir() if p.is_dir()]) == 1
        assert not (home / stored.path).exists()
        assert not parts(home)
        (home / "there").unlink()
        session.run(build_receiver_command(sys.executable, '{"prune": true}'))
        assert not list((home / ".csdctl" / "trees").iterdir())
        session.run(build_receiver_command(sys.executable, '{"prune": true}'))
        assert not list((home / OBJECTS).iterdir())


def test_special_file_is_never_opened(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    (tmp_path / "tree").mkdir()
    listening.bind(str(tmp_path / "tree" / "s"))
    with pytest.raises(InputError, match="is a socket and cannot be deployed"):
        read_tree(TreeRequest(tmp_path / "tree", "there"), SharedChunks())
    listening.close()
    assert chunks_module.printable(os.fsdecode(b"\xff")) == "\\xff"
