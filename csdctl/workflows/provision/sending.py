"""Send a bundle to a node over its session: Python first where it is missing, then the wheels it lacks.

Python goes through `tar`, as nothing that could compare files runs there yet. The wheels go by content, as a
tree (shipping): an interrupted transfer continues, and the host reads each file once for all nodes.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from csdctl.shipping.chunks import SharedChunks
from csdctl.shipping.deliver import OnDeliveryProgress, deliver
from csdctl.shipping.payload import Payload
from csdctl.transport.session import Session
from csdctl.workflows.provision.bundle import Bundle
from csdctl.workflows.provision.debian_python import python_directory
from csdctl.workflows.provision.machine import SENT_PYTHON, BareMachine, Kind, check_root, check_space

UNPACK_DEADLINE_S = 1800.0

# A directory with its final name was complete. One that has lost its Python is removed, because `mv` would
# move into it. `sync` before the rename, for a node that loses power here.
_HAS_PYTHON = '[ -x "$1/usr/bin/python$2" ]'
_UNPACK = """\
set -eu
umask 022
rm -rf "$1.part"
mkdir -p "$1.part"
tar -xzf - -C "$1.part"
sync
rm -rf "$1"
mv "$1.part" "$1"
"$1/usr/bin/python$2" -I -c 'import ssl, venv'
"""
# Keras writes ~/.keras when it is imported; uninstalling removes it if it was not there before.
_RECORD = """\
set -eu
[ -e .csdctl/provisioned.json ] || [ -e .keras ] || : > .csdctl/keras-is-new
printf '%s\\n' "$1" > .csdctl/provisioned.json.part
mv .csdctl/provisioned.json.part .csdctl/provisioned.json
"""


@dataclass(frozen=True)
class Sent:
    """What one node was sent, or would be."""

    python: str
    """The path of the Python on which the packages are installed."""
    bundle_id: str
    num_files: int
    num_bytes: int
    is_installed: bool
    """Whether this bundle is installed there already; then nothing was sent."""


class BundleSender:
    """The bundles of all kinds, read once for all nodes; `send` is called from many threads."""

    def __init__(self, bundles: Mapping[Kind, Bundle], prefix: str) -> None:
        self._bundles = bundles
        self._prefix = prefix
        self._chunks = SharedChunks()
        self._lock = threading.Lock()
        self._parcels: dict[Kind, Payload] = {}
        self._archives: dict[Kind, bytes] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes of wheels read from the host's disk so far."""
        return self._chunks.bytes_read

    def send(
        self,
        session: Session,
        machine: BareMachine,
        *,
        dry_run: bool = False,
        on_progress: OnDeliveryProgress = lambda progress: None,
    ) -> Sent:
        """Send `machine` what it lacks.

        Raises NodeError for a disk that is too small, and what `deliver` raises.
        """
        bundle = self._bundles[machine.kind]
        python = machine.python
        if machine.kind.sends_python:
            python = f"{python_directory(self._prefix, bundle.python_id)}/usr/bin/python{SENT_PYTHON}"
        if machine.installed == bundle.id:
            return Sent(python, bundle.id, 0, 0, is_installed=True)
        python_bytes = self._send_python(session, machine, bundle, dry_run=dry_run)
        if dry_run and python_bytes:  # without Python, nothing can compare files there
            return Sent(python, bundle.id, len(bundle.wheels) + 1, bundle.num_bytes, is_installed=False)
        payload = self._payload(machine.kind)
        delivery = deliver(
            session, payload, self._chunks, python=python, dry_run=dry_run, on_progress=on_progress
        )
        if not dry_run:
            _record(session, python, bundle)
        num_files = delivery.num_sent + bool(python_bytes)
        return Sent(python, bundle.id, num_files, delivery.bytes_sent + python_bytes, is_installed=False)

    def _send_python(self, session: Session, machine: BareMachine, bundle: Bundle, *, dry_run: bool) -> int:
        """Unpack the archive of Python there; return its size, or 0 if it was there already."""
        if not bundle.python:
            check_space(machine, bundle.unpacked_bytes, bundle.wheel_bytes, self._prefix)
            return 0
        directory = python_directory(self._prefix, bundle.python_id)
        arguments = ("csdctl-python", directory, SENT_PYTHON)
        if session.run(["sh", "-c", _HAS_PYTHON, *arguments]).exit_code == 0:
            needed_bytes = bundle.unpacked_bytes - bundle.python.unpacked_bytes
            check_space(machine, needed_bytes, bundle.wheel_bytes, self._prefix)
            return 0
        check_root(machine)
        check_space(machine, bundle.unpacked_bytes, bundle.wheel_bytes, self._prefix)
        if not dry_run:
            as_root = [] if machine.is_root else ["sudo", "-n"]
            done = session.run(
                [*as_root, "sh", "-c", _UNPACK, *arguments],
                stdin=self._archive(machine.kind),
                deadline_s=UNPACK_DEADLINE_S,
            )
            done.check(session.name, doing="unpacking Python", remedy="check its disk: `df -h`, `mount`")
        return bundle.python.num_bytes

    def _payload(self, kind: Kind) -> Payload:
        with self._lock:
            if kind not in self._parcels:
                self._parcels[kind] = self._bundles[kind].pack(self._chunks)
            return self._parcels[kind]

    def _archive(self, kind: Kind) -> bytes:
        with self._lock:
            if kind not in self._archives:
                self._archives[kind] = self._bundles[kind].python_archive().read_bytes()
            return self._archives[kind]


def _record(session: Session, python: str, bundle: Bundle) -> None:
    """Leave for the playbook what was sent, and which Python to install it with."""
    record = json.dumps({"python": python, "bundle": bundle.id})
    done = session.run(["sh", "-c", _RECORD, "csdctl-record", record])
    done.check(session.name, doing="recording what was sent", remedy="check its disk: `df -h`")
