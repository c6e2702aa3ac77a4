"""Pruning removes what no deployed tree uses."""

import json
import sys
from pathlib import Path

from csdctl.shipping.deliver import build_receiver_command
from csdctl.shipping.store import OBJECTS, store_bytes
from tests.unit.shipping.delivering import (
    Machine,
    content_of,
    parts,
    send,
    send_tree,
)


class TestPruning:
    def test_unused_files_are_removed(self, node: Machine, source: Path, host: Path) -> None:
        session, home = node
        send_tree(session, source)
        (source / "a").write_bytes(b"changed")
        send_tree(session, source)
        stored = store_bytes(b"worker", ".pyz", host)
        send(session, stored)
        (home / f"{stored.path}.part").write_bytes(b"part")
        done = session.run(build_receiver_command(sys.executable, '{"prune": true}'))
        assert json.loads(done.output.partition(" ")[2])["num_removed"] > 0
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
