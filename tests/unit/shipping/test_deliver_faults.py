"""Delivery under faults: failed writes, damaged parts, changing sources, two deploys at a time."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import InputError, NodeError, RemoteCommandError
from csdctl.shipping.deliver import Delivery, deliver
from csdctl.shipping.payload import TreeRequest, pack_payload, read_tree
from csdctl.shipping.store import OBJECTS, hash_file, store_bytes
from csdctl.transport.local import LocalSession
from csdctl.transport.ssh import connect
from tests.unit.shipping.delivering import Machine, content_of, parts, send, send_tree


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
        assert len(os.listdir(server.home / OBJECTS)) == len(parts(server.home)) + 2

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
