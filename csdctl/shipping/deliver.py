"""Deliver a parcel to one machine: a command there reports missing objects and receives only those.

If nothing is missing, this takes one round trip. The other end is `standalone/receive.py`.
"""

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from csdctl.errors import CsdctlError, InputError, NodeError, RemoteCommandError
from csdctl.shipping.chunks import CHUNK_BYTES, SharedChunks, changed
from csdctl.shipping.parcel import Parcel, StoreObject
from csdctl.shipping.receiver import build_receiver_command
from csdctl.transport.session import Conversation, Session

RESPONSE_DEADLINE_S = 60.0
"""The receiver sends a heartbeat every second, so this only detects a machine that hangs."""

SEND_BYTES = 256 * 1024

_REMEDIES = {
    errno.ENOSPC: "free disk space there: `df -h`, `csdctl clean`",
    errno.EDQUOT: "free space within the user's quota there",
    errno.EROFS: "the file system is mounted read-only: check `mount` and `dmesg` there",
    errno.EACCES: "fix the permissions there, or deploy as another user",
    errno.EPERM: "fix the permissions there, or deploy as another user",
    errno.EIO: "the disk there reports errors: check `dmesg`",
}


@dataclass(frozen=True)
class Delivery:
    """The result of a delivery to one machine, or of a dry run."""

    num_sent: int
    bytes_sent: int
    num_present: int


@dataclass(frozen=True)
class DeliveryProgress:
    """The progress of one machine; `bytes_total` is the size of its missing objects."""

    node: str
    bytes_sent: int
    bytes_total: int


OnDeliveryProgress = Callable[[DeliveryProgress], None]


def deliver(
    session: Session,
    parcel: Parcel,
    chunks: SharedChunks,
    *,
    python: str = "python3",
    dry_run: bool = False,
    on_progress: OnDeliveryProgress = lambda progress: None,
) -> Delivery:
    """Send the machine the missing part of `parcel`; with `dry_run`, only determine that part.

    Sources are read through `chunks`, which all machines of one deploy share. Raises InputError for a source
    that changes meanwhile or an occupied destination, RemoteCommandError with the machine's own message when
    it cannot write, UnreachableError and DeadlineError. The next deploy then continues partial objects; an
    incomplete object never has its final name.
    """
    if not parcel.objects and not parcel.trees:
        return Delivery(0, 0, 0)
    command = build_receiver_command(python, parcel.build_request(dry_run=dry_run))
    with closing(session.converse(command)) as conversation:
        return _Exchange(session, parcel, conversation, chunks, dry_run, on_progress).run()


class _Exchange:
    """The host's side of a conversation with a receiver."""

    def __init__(
        self,
        session: Session,
        parcel: Parcel,
        conversation: Conversation,
        chunks: SharedChunks,
        dry_run: bool,
        on_progress: OnDeliveryProgress,
    ) -> None:
        self._node = session.name
        self._meter = session.meter
        self._parcel = parcel
        self._conversation = conversation
        self._chunks = chunks
        self._dry_run = dry_run
        self._on_progress = on_progress
        self._missing: dict[StoreObject, int] = {}
        """The objects of the latest request, with the byte to start from."""
        self._sent: set[StoreObject] = set()
        self._bytes_sent = 0

    def run(self) -> Delivery:
        """Serve the receiver's requests until it is done."""
        while True:
            response = self._read()
            if "done" in response:
                self._conversation.wait(deadline_s=RESPONSE_DEADLINE_S)
                num_sent = len(self._sent)
                return Delivery(num_sent, self._bytes_sent, len(self._parcel.objects) - num_sent)
            if "refused" in response:
                raise InputError(response["refused"], remedy=response.get("remedy", ""), node=self._node)
            if "failed" in response:
                raise self._failure(response)
            if "need" in response:
                self._send(iter([self._parcel.packed]))
            elif "missing" in response:
                self._record_missing(response)
                if not response["more"]:
                    self._send_missing()

    def _read(self) -> dict[str, Any]:
        """Return the next response that is not a heartbeat; raises NodeError when the receiver ends."""
        while True:
            try:
                line = self._conversation.read_line(deadline_s=RESPONSE_DEADLINE_S)
            except EOFError:
                raise self._ended() from None
            try:
                response = json.loads(line)
                if "busy" not in response:
                    return dict(response)
            except (ValueError, TypeError):
                raise RemoteCommandError(
                    f"receiving files: invalid response {line[:200]!r}", node=self._node
                ) from None

    def _record_missing(self, response: dict[str, Any]) -> None:
        for first, last in response["missing"]:
            for number in range(first, last + 1):
                start = response["resume"].get(str(number), 0)
                self._missing[self._parcel.objects[number]] = start

    def _send_missing(self) -> None:
        missing, self._missing = self._missing, {}
        self._sent |= missing.keys()
        if self._dry_run:
            self._bytes_sent = sum(stored.source.size for stored in missing)
        else:
            total = sum(stored.source.size - start for stored, start in missing.items())
            self._send(self._content(missing), total)

    def _content(self, missing: dict[StoreObject, int]) -> Iterator[bytes]:
        """Yield the bytes of `missing`: large files in chunks, small files combined."""
        gathered = bytearray()
        for stored, begin in missing.items():
            for start in range(begin - begin % CHUNK_BYTES, stored.source.size, CHUNK_BYTES):
                chunk = self._chunks.read(stored.source, start)[max(0, begin - start) :]
                self._meter.record(stored.traffic_class, sent=len(chunk))
                if len(gathered) + len(chunk) <= SEND_BYTES:
                    gathered += chunk
                    continue
                yield bytes(gathered)
                gathered.clear()
                yield chunk
        yield bytes(gathered)

    def _send(self, content: Iterator[bytes], num_bytes: int = 0) -> None:
        """Send `content`; a receiver that ends early reports why in its next response."""
        sent = 0
        self._on_progress(DeliveryProgress(self._node, 0, num_bytes))
        for chunk in content:
            try:
                for start in range(0, len(chunk), SEND_BYTES):
                    part = chunk[start : start + SEND_BYTES]
                    self._conversation.send_bytes(part)
                    sent += len(part)
                    self._on_progress(DeliveryProgress(self._node, sent, num_bytes))
            except EOFError:
                break
        if num_bytes:
            self._bytes_sent += sent

    def _failure(self, response: dict[str, Any]) -> CsdctlError:
        """Return the receiver's failure as an error: damaged objects, or a system error."""
        if response["failed"] == "damaged":
            return self._damaged([self._parcel.objects[number] for number in response["numbers"]])
        where = f" at {response['path']}" if response["path"] else ""
        return RemoteCommandError(
            f"receiving files failed{where}: {response['words']}",
            node=self._node,
            remedy=_REMEDIES.get(response["errno"], "check the disk there: `df -h`, `mount`"),
        )

    def _damaged(self, damaged: list[StoreObject]) -> CsdctlError:
        for stored in damaged:
            if SharedChunks(0).hash_source(stored.source.path).sha256 != stored.source.sha256:
                return changed(stored.source.path)
        return NodeError(
            f"{len(damaged)} of {len(self._parcel.objects)} files arrived damaged twice",
            node=self._node,
            remedy="check that machine for failing disk or memory, then retry",
        )

    def _ended(self) -> CsdctlError:
        """Return why the receiver ended without a response; raises UnreachableError for a lost connection."""
        done = self._conversation.wait(deadline_s=RESPONSE_DEADLINE_S)
        try:
            done.check(
                self._node,
                doing="receiving files",
                remedy="the machine needs Python 3.8 or newer: set `python:` in fleet.yaml",
            )
        except RemoteCommandError as error:
            return error
        return RemoteCommandError("receiving files ended without a response", node=self._node)
