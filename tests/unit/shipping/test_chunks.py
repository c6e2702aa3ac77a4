"""The host reads each source once for many nodes, and never opens special files."""

import os
import socket
import threading
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.shipping import chunks as chunks_module
from csdctl.shipping.chunks import CHUNK_BYTES, SharedChunks
from csdctl.shipping.deliver import deliver
from csdctl.shipping.payload import Payload, TreeRequest, pack_payload, read_tree
from csdctl.transport.local import LocalSession
from tests.unit.shipping.delivering import (
    fill,
)


class TestSharedReading:
    def test_host_is_read_once_for_many_nodes(self, tmp_path: Path) -> None:
        source = fill(tmp_path / "tree", big=os.urandom(5 * CHUNK_BYTES + 17), small=b"small")
        total = 5 * CHUNK_BYTES + 22
        chunks = SharedChunks()
        payload = pack_payload(trees=[read_tree(TreeRequest(source, "there"), chunks)])
        self.deliver_to(4, payload, chunks, tmp_path)
        assert chunks.bytes_read == total

    def test_chunks_beyond_the_cache_are_read_twice(self, tmp_path: Path) -> None:
        content = os.urandom(6 * CHUNK_BYTES)
        source = fill(tmp_path / "tree", big=content)
        chunks = SharedChunks(max_bytes=2 * CHUNK_BYTES)
        payload = pack_payload(trees=[read_tree(TreeRequest(source, "there"), chunks)])
        self.deliver_to(1, payload, chunks, tmp_path)
        assert chunks.bytes_read == len(content) + 4 * CHUNK_BYTES

    def test_unreadable_chunk_fails_for_all_waiters(self, tmp_path: Path) -> None:
        source = fill(tmp_path / "tree", a=b"x")
        chunks = SharedChunks(max_bytes=0)
        found = chunks.hash_source(str(source / "a"))
        (source / "a").unlink()
        for _ in range(2):
            with pytest.raises(InputError, match="cannot be read"):
                chunks.read(found, 0)

    @staticmethod
    def deliver_to(num_nodes: int, payload: Payload, chunks: SharedChunks, directory: Path) -> None:
        def send_one(home: Path) -> None:
            deliver(LocalSession(home.name, home), payload, chunks)

        homes = [directory / f"node{number}" for number in range(num_nodes)]
        threads = [threading.Thread(target=send_one, args=(home,)) for home in homes]
        for home in homes:
            home.mkdir()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all((home / "there").is_dir() for home in homes)


def test_special_file_is_never_opened(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    (tmp_path / "tree").mkdir()
    listening.bind(str(tmp_path / "tree" / "s"))
    with pytest.raises(InputError, match="is a socket and cannot be deployed"):
        read_tree(TreeRequest(tmp_path / "tree", "there"), SharedChunks())
    listening.close()
    assert chunks_module.printable(os.fsdecode(b"\xff")) == "\\xff"
