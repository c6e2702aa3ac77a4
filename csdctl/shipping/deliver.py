"""Bringing a parcel to one machine: one command on it says what it misses, and gets exactly that.

When nothing is missing, one round trip does. The other end is `standalone/receive.py`.
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

ANSWER_DEADLINE_S = 60.0
"""The receiver says every second that it is still at work, so this is about a machine that hangs."""

SEND_BYTES = 256 * 1024

_REMEDIES = {
    errno.ENOSPC: "make room there: `df -h`, `csdctl clean`",
    errno.EDQUOT: "make room within the user's quota there",
    errno.EROFS: "the file system is mounted read-only: see `mount` and `dmesg` there",
    errno.EACCES: "mend the permissions there, or deploy as another user",
    errno.EPERM: "mend the permissions there, or deploy as another user",
    errno.EIO: "the disk there fails: see `dmesg`",
}


@dataclass(frozen=True)
class Delivery:
    """What bringing files to one machine came to, or would come to."""

    num_sent: int
    bytes_sent: int
    num_present: int


@dataclass(frozen=True)
class DeliveryProgress:
    """How far one machine is; `bytes_total` is what it misses."""

    node: str
    bytes_sent: int
    bytes_total: int


OnProgress = Callable[[DeliveryProgress], None]


def deliver(
    session: Session,
    parcel: Parcel,
    chunks: SharedChunks,
    *,
    python: str = "python3",
    dry_run: bool = False,
    on_progress: OnProgress = lambda progress: None,
) -> Delivery:
    """Bring to the machine what it lacks of `parcel`; with `dry_run`, only find out what that is.

    Sources are read through `chunks`, which is shared by all machines of one deploy. Raises InputError for a
    source that changes meanwhile or a destination that is taken, RemoteCommandError with the machine's own
    words when it cannot write, UnreachableError and DeadlineError. What arrived before is then continued by
    the next deploy; nothing half arrived is ever under its own name.
    """
    if not parcel.objects and not parcel.trees:
        return Delivery(0, 0, 0)
    command = build_receiver_command(python, parcel.build_request(dry_run=dry_run))
    with closing(session.converse(command)) as conversation:
        return _Exchange(session, parcel, conversation, chunks, dry_run, on_progress).run()


class _Exchange:
    """The host's side of one conversation with a receiver."""

    def __init__(
        self,
        session: Session,
        parcel: Parcel,
        conversation: Conversation,
        chunks: SharedChunks,
        dry_run: bool,
        on_progress: OnProgress,
    ) -> None:
        self._node = session.name
        self._meter = session.meter
        self._parcel = parcel
        self._conversation = conversation
        self._chunks = chunks
        self._dry_run = dry_run
        self._on_progress = on_progress
        self._missing: dict[StoreObject, int] = {}
        """What was asked for last, with the byte to begin from."""
        self._sent: set[StoreObject] = set()
        self._bytes_sent = 0

    def run(self) -> Delivery:
        """Answer what the receiver asks until it is done."""
        while True:
            answer = self._read()
            if "done" in answer:
                self._conversation.wait(deadline_s=ANSWER_DEADLINE_S)
                num_sent = len(self._sent)
                return Delivery(num_sent, self._bytes_sent, len(self._parcel.objects) - num_sent)
            if "refused" in answer:
                raise InputError(answer["refused"], remedy=answer.get("remedy", ""), node=self._node)
            if "failed" in answer:
                raise self._failure(answer)
            if "need" in answer:
                self._send(iter([self._parcel.packed]))
            elif "missing" in answer:
                self._note_missing(answer)
                if not answer["more"]:
                    self._send_missing()

    def _read(self) -> dict[str, Any]:
        """The next answer that wants one; raises NodeError for the receiver's own end."""
        while True:
            try:
                line = self._conversation.read_line(deadline_s=ANSWER_DEADLINE_S)
            except EOFError:
                raise self._ended() from None
            try:
                answer = json.loads(line)
                if "busy" not in answer:
                    return dict(answer)
            except (ValueError, TypeError):
                raise RemoteCommandError(
                    f"receiving files: unreadable answer {line[:200]!r}", node=self._node
                ) from None

    def _note_missing(self, answer: dict[str, Any]) -> None:
        for first, last in answer["missing"]:
            for number in range(first, last + 1):
                start = answer["resume"].get(str(number), 0)
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
        """The bytes of `missing`: large files in parts, many small ones together."""
        gathered = bytearray()
        for stored, begin in missing.items():
            for start in range(begin - begin % CHUNK_BYTES, stored.source.size, CHUNK_BYTES):
                chunk = self._chunks.read(stored.source, start)[max(0, begin - start) :]
                self._meter.record(stored.kind, sent=len(chunk))
                if len(gathered) + len(chunk) <= SEND_BYTES:
                    gathered += chunk
                    continue
                yield bytes(gathered)
                gathered.clear()
                yield chunk
        yield bytes(gathered)

    def _send(self, content: Iterator[bytes], num_bytes: int = 0) -> None:
        """Send `content`; a receiver that ended meanwhile says why in its next answer."""
        sent = 0
        self._on_progress(DeliveryProgress(self._node, 0, num_bytes))
        for chunk in content:
            try:
                for start in range(0, len(chunk), SEND_BYTES):
                    piece = chunk[start : start + SEND_BYTES]
                    self._conversation.send_bytes(piece)
                    sent += len(piece)
                    self._on_progress(DeliveryProgress(self._node, sent, num_bytes))
            except EOFError:
                break
        if num_bytes:
            self._bytes_sent += sent

    def _failure(self, answer: dict[str, Any]) -> CsdctlError:
        """What the receiver failed at, as an error: damaged objects, or a refusal of its system."""
        if answer["failed"] == "damaged":
            return self._damaged([self._parcel.objects[number] for number in answer["numbers"]])
        where = f" at {answer['path']}" if answer["path"] else ""
        return RemoteCommandError(
            f"receiving files failed{where}: {answer['words']}",
            node=self._node,
            remedy=_REMEDIES.get(answer["errno"], "check the disk there: `df -h`, `mount`"),
        )

    def _damaged(self, damaged: list[StoreObject]) -> CsdctlError:
        for stored in damaged:
            if SharedChunks(0).hash_source(stored.source.path).sha256 != stored.source.sha256:
                return changed(stored.source.path)
        return NodeError(
            f"{len(damaged)} of {len(self._parcel.objects)} files arrived damaged, twice",
            node=self._node,
            remedy="look for a failing disk or failing memory there, and try again",
        )

    def _ended(self) -> CsdctlError:
        """Why the receiver ended without a word; raises UnreachableError for a lost connection."""
        done = self._conversation.wait(deadline_s=ANSWER_DEADLINE_S)
        try:
            done.check(
                self._node,
                doing="receiving files",
                remedy="the machine needs Python 3.8 or newer: set `python:` in fleet.yaml",
            )
        except RemoteCommandError as error:
            return error
        return RemoteCommandError("receiving files ended without an answer", node=self._node)
