"""Delivery of files and trees to this machine and over SSH, with a real receiver, also under faults."""

import ast
import inspect
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import InputError, NodeError, RemoteCommandError
from csdctl.launch.leftovers import CleanupOptions, clean_machine
from csdctl.shipping.deliver import (
    DEFAULT_IGNORED,
    Delivery,
    DeliveryProgress,
    FileTree,
    Missing,
    TreeRequest,
    build_receiver,
    check_request,
    deliver,
    is_ignored,
    pack_payload,
    parse_tree,
    read_tree,
)
from csdctl.shipping.store import OBJECTS, hash_file, store_bytes
from csdctl.standalone import receive
from csdctl.transport.local import LocalSession
from csdctl.transport.ssh import connect
from csdctl.worker.protocol.json_codec import from_json
from tests.fake_session import FakeSession
from tests.unit.shipping.conftest import Machine, content_of, fill, parts, send, send_tree
from tests.unit.transport.conftest import NASTY_NAMES


class TestFiles:
    pytestmark = pytest.mark.first(2)

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
    def test_damaged_file_is_found_and_replaced(self, node: Machine, host: Path) -> None:
        """Other bytes of the same size, a file that was cut short, other permissions, and a link."""
        session, home = node
        contents = [b"content %d" % number for number in range(4)]
        files = [store_bytes(content, ".bin", host) for content in contents]
        send(session, *files)
        paths = [home / file.path for file in files]
        paths[0].write_bytes(b"CONTENT 0")
        paths[1].write_bytes(b"cont")
        paths[2].chmod(0o644)
        paths[3].unlink()
        paths[3].symlink_to("/etc/passwd")
        assert send(session, *files).num_sent == 4
        assert [path.read_bytes() for path in paths] == contents
        assert not paths[3].is_symlink()

    def test_unchanged_files_take_one_command_and_no_files_take_none(self, host: Path) -> None:
        session = FakeSession("csd0").on("sh", stdout="@csdctl-result {}")
        assert send(session) == Delivery(0, 0, 0)
        send(session, store_bytes(b"x", "", host))
        assert len(session.commands) == 1
        assert session.conversations[0].is_closed

    def test_missing_python_is_an_error_with_the_required_version(self, node: Machine, host: Path) -> None:
        """But python3 is used where the node's Python is missing."""
        session, stored = FakeSession("csd4"), store_bytes(b"x", "", host)
        session.on("sh", exit_code=127, stderr="python3: not found")
        with pytest.raises(RemoteCommandError, match="not found") as raised:
            send(session, stored)
        assert (raised.value.node, "Python (3.8" in raised.value.remedy) == ("csd4", True)
        assert send(node[0], stored, python="/opt/none/bin/python").num_sent == 1


class TestTrees:
    pytestmark = pytest.mark.first(2)

    def test_tree_arrives_unchanged(self, machine: Machine, source: Path) -> None:
        session, home = machine
        (source / "empty" / "directory").mkdir(parents=True)
        (source / ".hidden").write_bytes(b"hidden")
        for name, mode in (("run", 0o755), ("secret", 0o600)):
            (source / name).write_bytes(b"one")
            (source / name).chmod(mode)
        (source / "link").symlink_to("deep/b")
        (source / "deep" / "up").symlink_to("../a")
        before, there = set(home.rglob("*")), home / "there"
        planned = send_tree(session, source, dry_run=True)
        assert set(home.rglob("*")) == before
        assert send_tree(session, source) == planned
        assert (planned.num_sent > 1, planned.num_present) == (True, 0)
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

        with ThreadPoolExecutor() as pool:
            reader = pool.submit(read)
            for number in range(5):
                fill(source, **dict.fromkeys("abcdefgh", b"new %d" % number))
                send_tree(session, source)
            stopping.set()
        assert reader.result() is None
        assert all(len(contents) == 1 for contents in seen)

    def test_two_trees_are_sent_together_unless_one_is_in_the_other(
        self, node: Machine, source: Path, host: Path
    ) -> None:
        session, home = node
        second = fill(host / "second", a=b"one", z=b"zzz")
        requests = [TreeRequest(source, "first"), TreeRequest(second, "deep/second")]
        payload = pack_payload(trees=[read_tree(request) for request in requests])
        assert deliver(session, payload) == Delivery(3, 9, 0)
        assert content_of(home / "first") == content_of(source)
        assert content_of(home / "deep" / "second") == content_of(second)
        (home / "absolute" / "data").mkdir(parents=True)
        send_tree(session, source, str(home / "absolute" / "data"))  # an empty directory may be there
        assert content_of(home / "absolute" / "data") == content_of(source)
        with pytest.raises(InputError, match="overlap"):
            pack_payload(trees=[read_tree(TreeRequest(source, name)) for name in ("a/b", "a")])
        with pytest.raises(InputError, match="inside another tree"):
            send_tree(session, source, "first/inside")

    @pytest.mark.parametrize(
        "create",
        [
            lambda path: fill(path, precious=b"data"),
            lambda path: path.write_bytes(b"data"),
            lambda path: path.symlink_to(path.parent),
            lambda path: path.symlink_to("nowhere"),
        ],
        ids=["directory", "file", "link", "dangling link"],
    )
    def test_foreign_destination_is_refused_and_unchanged(
        self, node: Machine, source: Path, create: Callable[[Path], object]
    ) -> None:
        session, home = node
        there = home / "there"
        create(there)
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
        no_links = "import os,errno\ndef link(*_): raise OSError(errno.EMLINK,'')\nos.link=link\n"
        command[position] = no_links + command[position]
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
        found = clean_machine(session, sys.executable, CleanupOptions(is_pruning=True))
        pruning = CleanupOptions(is_pruning=True, is_removing=True)
        assert {*found.paths} == {*clean_machine(session, sys.executable, pruning).paths}
        assert {Path(path).name.partition("-")[0] for path in found.paths} >= {stored.name}
        assert content_of(home / "there") == content_of(source)
        assert send_tree(session, source).num_sent == 0
        assert not (home / stored.path).exists()
        assert not parts(home)
        (home / "there").unlink()
        clean_machine(session, sys.executable, pruning)
        assert not [*(home / ".csdctl" / "trees").iterdir(), *(home / OBJECTS).iterdir()]


class TestFaults:
    @pytest.mark.fault(25)
    def test_write_error_during_delivery_keeps_the_old_tree(self, server: Any, source: Path) -> None:
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
        assert len(os.listdir(server.state / OBJECTS)) == len(parts(server.home)) + 2

    @pytest.mark.fault(27)
    def test_files_that_arrived_before_an_interruption_are_not_sent_again(
        self, node: Machine, host: Path
    ) -> None:
        session, home = node
        files = [store_bytes(os.urandom(9_000_000), ".bin", host) for _ in range(2)]

        def interrupt(progress: DeliveryProgress) -> None:
            if progress.bytes_sent > 16_000_000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            send(session, *files, on_progress=interrupt)
        (home / f"{files[1].path}.part").write_bytes(bytes(9_000_000))
        assert send(session, *files) == Delivery(1, 9_000_000, 1)
        assert [hash_file(home / file.path) for file in files] == [file.sha256 for file in files]
        assert not parts(home)

    @pytest.mark.fault(29)
    @pytest.mark.parametrize("change", ["other bytes", "cut short", "gone", "same size and time"])
    def test_source_that_changes_meanwhile_is_named_and_not_deployed(
        self, node: Machine, source: Path, change: str
    ) -> None:
        session, home = node
        send_tree(session, source)
        big = source / "big"
        big.write_bytes(os.urandom(1_000_000))
        payload = pack_payload(trees=[read_tree(TreeRequest(source, "there"))])
        times = big.stat()
        if change == "gone":
            big.unlink()
        else:
            big.write_bytes(os.urandom(10 if change == "cut short" else 1_000_000))
        if change == "same size and time":
            os.utime(big, ns=(times.st_atime_ns, times.st_mtime_ns))
        words = "cannot be read" if change == "gone" else "changed while it was being deployed"
        with pytest.raises(InputError, match=f"{source}/big {words}"):
            deliver(session, payload)
        assert not (home / "there" / "big").exists()
        assert (home / "there" / "a").read_bytes() == b"one"

    def test_file_that_arrives_damaged_is_an_error_of_the_node(
        self, node: Machine, host: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = store_bytes(b"right", ".bin", host)
        payload = pack_payload([stored])
        monkeypatch.setattr("csdctl.shipping.deliver.read_chunk", lambda source, start: b"wrong")
        with pytest.raises(NodeError, match="arrived damaged") as raised:
            deliver(node[0], payload)
        assert raised.value.node == "csd0"
        assert not (node[1] / stored.path).exists()

    def test_two_deploys_to_one_home_take_turns(self, node: Machine, source: Path) -> None:
        _, home = node
        (source / "big").write_bytes(os.urandom(3_000_000))
        with ThreadPoolExecutor() as pool:
            sessions = [LocalSession("csd0", home, {"HOME": str(home)}) for _ in range(4)]
            runs = [pool.submit(send_tree, session, source) for session in sessions]
        deliveries = [run.result() for run in runs]
        assert sum(delivery.num_sent for delivery in deliveries) == 3
        assert content_of(home / "there") == content_of(source)
        assert len([p for p in (home / ".csdctl" / "trees").iterdir() if p.is_dir()]) == 1


class TestNames:
    pytestmark = pytest.mark.first(10)

    @pytest.mark.fault(30)
    def test_any_name_arrives(self, machine: Machine, host: Path) -> None:
        session, home = machine
        names = [*NASTY_NAMES, os.fsdecode(b"not utf-8 \xff\xfe")]
        for name in names:
            (host / "tree" / name / name).mkdir(parents=True)
            (host / "tree" / name / name / name).write_bytes(b"content\0\xff")
            (host / "tree" / name / "link").symlink_to(name)
        send_tree(session, host / "tree", "deep")
        for name in names:
            assert (home / "deep" / name / name / name).read_bytes() == b"content\0\xff"
            assert os.readlink(home / "deep" / name / "link") == name
        send_tree(session, host / "tree" / names[-1], f"deep {names[0]}/{names[-1]}")
        assert not list(home.rglob("pwned"))

    @pytest.mark.fault(30)
    def test_names_survive_a_node_with_another_encoding(self, source: Path, tmp_path: Path) -> None:
        (source / "ü").write_bytes(b"u")
        payload = pack_payload(trees=[read_tree(TreeRequest(source, "thäre"))])
        command, first = build_receiver(sys.executable, {**payload.manifest, "dry_run": True})
        environment = {"LC_ALL": "C", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run(
            command, input=first, cwd=tmp_path, env=environment, capture_output=True, check=True
        )
        assert b'"marks": ["111"]' in done.stdout


def test_marks_of_very_many_objects_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    objects = [[f"{number:064x}", 0, 0o600] for number in range(200_000)]
    receive.Receiver({"objects": objects, "trees": [], "keep": []}).report([0, 65_536, 199_999])
    request = from_json(Missing, capsys.readouterr().out.removeprefix("@csdctl-missing "))
    assert check_request(request, 200_000) == [0, 65_536, 199_999]


def test_file_has_its_name_only_once_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next deploy, which finds it by content, takes it for one that survives a power cut."""
    monkeypatch.chdir(tmp_path)
    names = [sha256(content).hexdigest() for content in (b"whole", b"cut")]
    objects = [[names[0], 5, 0o600], [names[1], 3, 0o600]]
    receiver = receive.Receiver({"objects": objects, "trees": [], "keep": [0, 1]})
    stored, syncing = tmp_path / OBJECTS, list[list[str]]()
    stored.mkdir(parents=True)

    def read_input(num_bytes: int) -> Iterator[bytes]:
        if num_bytes == 3:
            raise BrokenPipeError
        yield b"whole"

    def sync(handle: int) -> None:
        syncing.append([Path(os.readlink(f"/proc/self/fd/{handle}")).name, *os.listdir(stored)])
        if len(syncing) == 1:
            raise BrokenPipeError

    monkeypatch.setattr(receive, "read_input", read_input)
    monkeypatch.setattr(os, "fsync", sync)
    for num_synced, expected in ((1 << 20, set[str]()), (5, set[str]()), (5, {names[0]})):
        monkeypatch.setattr(receive, "SYNC_BYTES", num_synced)
        with pytest.raises(BrokenPipeError):  # by the second object, by the first sync, by the second object
            receiver.receive([0, 1])
        assert {*os.listdir(stored)} & {*names} == expected
    assert [parts[0] for parts in syncing] == [f"{names[0]}.part"] * 2 + ["objects"]
    assert [names[0] in parts for parts in syncing] == [False, False, True]


@pytest.mark.parametrize("destination", [".csdctl", "./.csdctl/objects"])
def test_tree_is_not_put_into_the_store(node: Machine, source: Path, destination: str) -> None:
    with pytest.raises(InputError, match="csdctl's own directory"):
        send_tree(node[0], source, destination)
    assert not list(node[1].rglob("*"))


def test_receiver_is_python_3_8_and_imports_the_standard_library_only() -> None:
    tree = ast.parse(inspect.getsource(receive), feature_version=(3, 8))
    imported = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", ".hidden", ".git/config", "deep/__pycache__/x.pyc", "deep/b.tmp", "deep/c"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "source"


def read(folder: Path, *ignored: str) -> FileTree:
    return read_tree(TreeRequest(folder, "there"), ignored)


def names(tree: FileTree) -> list[str]:
    return [name for name, _ in tree.files]


def test_everything_except_ignored_files_is_included(folder: Path) -> None:
    assert names(read(folder, *DEFAULT_IGNORED)) == [".hidden", "a", "deep/b.tmp", "deep/c"]
    assert names(read(folder, *DEFAULT_IGNORED, "*.tmp")) == [".hidden", "a", "deep/c"]
    assert ".git/config" in names(read(folder))


@pytest.mark.parametrize(
    ("pattern", "name", "is_directory", "fits"),
    [
        ("*.tmp", "a/b.tmp", False, True),
        ("*.tmp", "a.tmp/b", False, False),
        ("build/", "x/build", True, True),
        ("build/", "x/build", False, False),
        ("docs/*.pdf", "docs/a.pdf", False, True),
        ("docs/*.pdf", "x/docs/a.pdf", False, False),
        ("/top", "top", False, True),
        ("data[0-3]", "data2", True, True),
        ("DATA", "data", False, False),
    ],
)
def test_patterns_match_as_in_gitignore(pattern: str, name: str, is_directory: bool, fits: bool) -> None:
    assert is_ignored(name, [pattern], is_directory=is_directory) is fits


@pytest.mark.fault(31)
@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "deep/../../outside", "deep/up/../outside"])
def test_symbolic_link_pointing_outside_is_refused_by_name(folder: Path, target: str) -> None:
    (folder / "deep" / "up").symlink_to("..")
    (folder / "link").symlink_to(target)
    with pytest.raises(InputError, match="source/link points outside the tree") as raised:
        read(folder)
    assert "--ignore" in raised.value.remedy
    assert "link" not in names(read(folder, "link", "up"))


def test_links_inside_stay_links_and_times_do_not_count(folder: Path) -> None:
    before = read(folder).files
    os.utime(folder / "a", (0, 0))
    assert [stored.name for _, stored in read(folder).files] == [stored.name for _, stored in before]
    (folder / "deep" / "link").symlink_to("../a")
    (folder / "dangling").symlink_to("not-there")
    assert read(folder).links == (("dangling", "not-there"), ("deep/link", "../a"))


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        bind,
        os.mkfifo,
        pytest.param(
            lambda path: os.mknod(path, 0o020666, os.makedev(1, 3)), marks=pytest.mark.needs("root")
        ),
    ],
)
def test_special_files_are_refused_by_name(folder: Path, make: Callable[[Path], object]) -> None:
    make(folder / "special")
    with pytest.raises(InputError, match="source/special is a (socket|pipe|device) and cannot be deployed"):
        read(folder)
    assert "a" in names(read(folder, "special"))


class TestWrittenTrees:
    def test_destination_is_the_sources_name_or_what_follows_the_last_colon(self, tmp_path: Path) -> None:
        for name in ("tree", "odd:name"):
            (tmp_path / name).mkdir()
        tree, odd = tmp_path / "tree", tmp_path / "odd:name"
        assert parse_tree(str(tree)) == TreeRequest(tree, "tree")
        assert parse_tree(f"{tree}/") == TreeRequest(tree, "tree")
        assert parse_tree(f"{tree}:opt/x/") == TreeRequest(tree, "opt/x")
        assert parse_tree(f"{tree}:~/x") == TreeRequest(tree, "x")
        assert parse_tree(f"{tree}:/srv/x") == TreeRequest(tree, "/srv/x")
        assert parse_tree(f"{odd}:") == TreeRequest(odd, "odd:name")
        assert parse_tree(f"{odd}:x") == TreeRequest(odd, "x")

    @pytest.mark.parametrize(
        "written", ["", ":x", "{}/none", "{}/file", "{}:..", "{}:a/../b", "{}:.", "{}:~", "{}:/"]
    )
    def test_invalid_tree_is_an_error_with_a_remedy(self, tmp_path: Path, written: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match="--tree") as raised:
            parse_tree(written.format(tmp_path))
        assert raised.value.remedy
