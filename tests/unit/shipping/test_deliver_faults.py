"""Delivery under faults: full disks, lost connections, damaged parts, changing sources, killed receivers."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import InputError, NodeError, RemoteCommandError, UnreachableError
from csdctl.shipping.deliver import Delivery, DeliveryProgress, deliver
from csdctl.shipping.payload import TreeRequest, pack_payload, read_tree
from csdctl.shipping.store import OBJECTS, hash_file, store_bytes
from csdctl.transport.local import LocalSession
from csdctl.transport.ssh import connect
from tests.unit.shipping.delivering import Machine, content_of, parts, send, send_tree


@contextmanager
def file_system(place: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs at `place`."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield place
    finally:
        # Lazy, because processes of a closed session may take a moment to end.
        subprocess.run(["umount", "--lazy", place], check=True)


class TestFaults:
    @pytest.mark.fault(25)
    @pytest.mark.needs("mounts")
    @pytest.mark.parametrize("limit", ["size=2m", "nr_inodes=40"])
    def test_full_disk_is_reported_and_keeps_the_old_tree_without_parts(
        self, source: Path, tmp_path: Path, limit: str
    ) -> None:
        with file_system(tmp_path / "node", limit) as home:
            session = LocalSession("csd0", home)
            send_tree(session, source)
            (source / "a").write_bytes(b"new")
            (source / "big").write_bytes(os.urandom(4_000_000 if limit == "size=2m" else 1))
            for number in range(60):
                (source / f"empty {number}").mkdir()
            with pytest.raises(RemoteCommandError, match="No space left on device") as raised:
                send_tree(session, source)
            assert (raised.value.node, "df -h" in raised.value.remedy) == ("csd0", True)
            assert not (home / "there" / "empty 0").exists()
            assert (home / "there" / "a").read_bytes() == b"one"
            assert not parts(home)

    @pytest.mark.fault(26)
    @pytest.mark.needs("mounts")
    def test_read_only_file_system_is_reported_and_existing_files_are_found(
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
        assert len(os.listdir(server.home / OBJECTS)) == len(parts(server.home)) + 2

    @pytest.mark.fault(27)
    def test_interrupted_delivery_leaves_a_part_that_the_next_deploy_continues(
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
    @pytest.mark.parametrize(
        ("size", "part", "expected"),
        [
            (5_000_000, bytes(3_000_000), Delivery(1, 7_000_000, 0)),
            (5_000, bytes(5_000), Delivery(1, 5_000, 0)),
            (5_000, None, Delivery(0, 0, 1)),
        ],
        ids=["wrong beginning", "wrong content of the right size", "complete"],
    )
    def test_part_is_used_only_if_its_content_is_right(
        self, node: Machine, host: Path, size: int, part: bytes | None, expected: Delivery
    ) -> None:
        session, home = node
        stored = store_bytes(os.urandom(size), ".bin", host)
        (home / OBJECTS).mkdir(parents=True)
        content = stored.source.read_bytes() if part is None else part
        (home / f"{stored.path}.part").write_bytes(content)
        assert send(session, stored) == expected
        assert hash_file(home / stored.path) == stored.sha256
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

    def test_file_that_arrives_damaged_twice_is_an_error_of_the_node(
        self, node: Machine, host: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = store_bytes(b"right", ".bin", host)
        payload = pack_payload([stored])
        monkeypatch.setattr("csdctl.shipping.deliver.read_chunk", lambda source, start: b"wrong")
        with pytest.raises(NodeError, match="1 of 1 files arrived damaged") as raised:
            deliver(node[0], payload)
        assert raised.value.node == "csd0"
        assert not (node[1] / stored.path).exists()

    @pytest.mark.fault(33)
    def test_file_times_of_the_node_are_ignored(self, node: Machine, source: Path) -> None:
        session, home = node
        send_tree(session, source)
        for path in (home / "there").rglob("*"):
            os.utime(path, (0, 2**32))
        assert send_tree(session, source).num_sent == 0
        (home / "there" / "a").write_bytes(b"ONE")
        os.utime(home / "there" / "a", (2**32, 2**32))
        assert send_tree(session, source).num_sent == 1

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
            thread.join()
        assert sum(delivery.num_sent for delivery in deliveries) == 3
        assert content_of(home / "there") == content_of(source)
        assert len([p for p in (home / ".csdctl" / "trees").iterdir() if p.is_dir()]) == 1
