"""Deliver a payload to one machine: a command there reports missing objects and receives only those.

If nothing is missing, this takes one round trip. The other end is `standalone/receive.py`; its source is part
of the command line.

An answer that breaks the rules of `ReceiverAnswers` ends the delivery to that machine: RemoteCommandError.
They bound the number of answers too: a manifest is requested once, every object at most MAX_ROUNDS times, and
heartbeats are rare.
"""

import ast
import base64
import errno
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache

from csdctl.errors import CsdctlError, DeadlineError, InputError, NodeError, RemoteCommandError
from csdctl.shipping.chunks import CHUNK_BYTES, SharedChunks, changed
from csdctl.shipping.payload import Payload, StoreObject
from csdctl.transport.answer import Answer
from csdctl.transport.commands import read_program
from csdctl.transport.process import Deadline
from csdctl.transport.session import Conversation, Session
from csdctl.worker.protocol.json_codec import shorten

MAX_ROUNDS = 2
"""A receiver requests an object that arrived damaged once more (MAX_TRIES there)."""

MAX_RANGES = 1000
MAX_DAMAGED = 100
MAX_HEARTBEATS_PER_S = 2.0
"""An honest receiver sends one per second."""

SPARE_HEARTBEATS = 60
"""Heartbeats that a slow network may deliver together."""


@dataclass(frozen=True)
class Refused:
    """The receiver refuses the request."""

    message: str
    remedy: str


@dataclass(frozen=True)
class SystemFailure:
    """The receiver's machine failed to write."""

    error_number: int
    words: str
    path: str


@dataclass(frozen=True)
class Damaged:
    """Objects, by number, that arrived damaged in every round."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Missing:
    """Objects to send: the byte to start from, by number."""

    offsets: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """Everything is in place."""


@dataclass(frozen=True)
class ManifestWanted:
    """The receiver lacks the manifest."""


ReceiverAnswer = Refused | SystemFailure | Damaged | Missing | Done | ManifestWanted


class ReceiverAnswers:
    """Reads the answers of one receiver, in order."""

    def __init__(self, sizes: Sequence[int], *, has_manifest: bool, is_dry_run: bool) -> None:
        """`sizes` are those of the offered objects; `has_manifest` says whether a manifest can be sent."""
        self._sizes = sizes
        self._may_want_manifest = has_manifest
        self._rounds_left = 1 if is_dry_run else MAX_ROUNDS
        self._allowed = set(range(len(sizes)))
        """Numbers that may be requested in this round: those of the round before."""
        self._requested: dict[int, int] = {}
        self._num_heartbeats = 0

    def read(self, answer: Answer, elapsed_s: float) -> ReceiverAnswer | None:
        """Return what is to be done, None for nothing yet; raises RemoteCommandError."""
        if "busy" in answer:
            self._num_heartbeats += 1
            if self._num_heartbeats > SPARE_HEARTBEATS + MAX_HEARTBEATS_PER_S * elapsed_s:
                raise answer.error(f"received {self._num_heartbeats} heartbeats in {elapsed_s:.1f} s")
            return None
        if "done" in answer:
            return Done()
        if "refused" in answer:
            return Refused(answer.text("refused"), answer.text("remedy", ""))
        if "failed" in answer:
            return self._read_failure(answer)
        if "need" in answer:
            if not self._may_want_manifest:
                raise answer.error("received a request for the manifest, which was sent already")
            self._may_want_manifest = False
            return ManifestWanted()
        if "missing" in answer:
            return self._read_missing(answer)
        raise answer.error("received an object that is no answer of a receiver")

    def _read_failure(self, answer: Answer) -> Damaged | SystemFailure:
        if answer.text("failed") == "damaged":
            numbers = answer.numbers("numbers", MAX_DAMAGED, high=len(self._sizes) - 1)
            return Damaged(tuple(dict.fromkeys(numbers)))
        return SystemFailure(answer.number("errno", high=1 << 16), answer.text("words"), answer.text("path"))

    def _read_missing(self, answer: Answer) -> Missing | None:
        """Add one part of a request; return the request when it is complete."""
        if not self._rounds_left:
            raise answer.error("received another request for objects after the last one")
        numbers = self._read_ranges(answer)
        offsets = self._read_offsets(answer, numbers)
        self._requested |= {number: offsets.get(number, 0) for number in numbers}
        if answer.flag("more"):
            if not numbers:
                raise answer.error("received a part of a request that is empty")
            return None
        missing, self._requested = Missing(self._requested), {}
        self._allowed = set(missing.offsets)
        self._rounds_left -= 1
        self._may_want_manifest = False
        return missing

    def _read_ranges(self, answer: Answer) -> list[int]:
        """Return the requested numbers: offered ones, ascending, each once in a request."""
        numbers: list[int] = []
        latest = max(self._requested, default=-1)
        for pair in answer.items("missing", MAX_RANGES):
            if not (
                isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
            ):
                raise answer.error("received a request for objects that are not [first, last]")
            first, last = pair
            if not latest < first <= last < len(self._sizes):
                raise answer.error(
                    f"received a request for objects {shorten(first)} to {shorten(last)}, expected ascending "
                    f"numbers from {latest + 1} to {len(self._sizes) - 1}"
                )
            numbers += range(first, last + 1)
            latest = last
        if not self._allowed.issuperset(numbers):
            raise answer.error("received a second request for objects that were not sent")
        return numbers

    def _read_offsets(self, answer: Answer, numbers: Sequence[int]) -> dict[int, int]:
        resume = answer.counts("resume", len(numbers))
        offsets = {number: resume.pop(str(number)) for number in numbers if str(number) in resume}
        is_inside = all(offset < self._sizes[number] for number, offset in offsets.items())
        if resume or not is_inside:
            raise answer.error("received an offset outside of a requested object")
        return offsets


PRUNE_DEADLINE_S = 900.0
_PRUNING = "removing unused files"

# A node gets its first files before its own Python is installed; until then python3 is used.
_START = 'command -v -- "$1" >/dev/null 2>&1 || { shift; set -- python3 "$@"; }; exec "$@"'


def build_receiver_command(python: str, request: str) -> list[str]:
    """Return the argument list that serves `request` (JSON) on a machine."""
    return ["sh", "-c", _START, "csdctl-receive", python, "-I", "-S", "-c", receiver_source(), request]


def prune_store(session: Session, python: str) -> int:
    """Remove unused objects and trees from the machine's store; return the number of removed names.

    Raises RemoteCommandError on failure.
    """
    command = build_receiver_command(python, json.dumps({"prune": True}))
    done = session.run(command, deadline_s=PRUNE_DEADLINE_S)
    done.check(session.name, doing=_PRUNING)
    answer = Answer.parse((done.output.splitlines() or [""])[-1], session.name, _PRUNING)
    return answer.part("done").number("num_removed")


_PARSING = threading.Lock()
"""Python 3.11 may fail with SystemError when several threads parse at a time."""


def receiver_source() -> str:
    """Return `standalone/receive.py` as one line of Python, without docstrings and comments; 7 kB."""
    with _PARSING:
        return _pack_source()


@cache
def _pack_source() -> str:
    source = read_program("receive")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
            lines[node.lineno - 1] = " " * node.col_offset + "pass" if node.col_offset else ""
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    code = "\n".join(" " * ((len(line) - len(line.lstrip())) // 4) + line.lstrip() for line in kept)
    packed = base64.b85encode(zlib.compress(code.encode(), 9)).decode()
    return f'import base64,zlib;exec(zlib.decompress(base64.b85decode("{packed}")))'


SEND_BYTES = 256 * 1024

_DOING = "receiving files"

_REMEDIES = {
    errno.ENOSPC: "free disk space there: `df -h`, `csdctl clean`",
    errno.EDQUOT: "free space within the user's quota there",
    errno.EROFS: "the file system is mounted read-only: check `mount` and `dmesg` there",
    errno.EACCES: "fix the permissions there, or deploy as another user",
    errno.EPERM: "fix the permissions there, or deploy as another user",
    errno.EIO: "the disk there reports errors: check `dmesg`",
}


@dataclass(frozen=True)
class DeliveryPatience:
    """How long a machine may take; whatever it answers, the delivery then ends."""

    response_s: float = 60.0
    """For one answer: the receiver sends a heartbeat every second, so this only detects one that hangs."""
    whole_s: float = 900.0
    """For the whole delivery: more than the receiver waits for another deploy to end (LOCK_WAIT_S there)."""
    bytes_per_s: float = 128 * 1024
    """Added to the whole: the time for all bytes at this rate, which is slower than a usable link or disk."""

    def start(self, payload: Payload) -> Deadline:
        """Return the deadline of a delivery that begins now."""
        num_bytes = sum(stored.source.size for stored in payload.objects) + len(payload.packed)
        return Deadline(self.whole_s + num_bytes / self.bytes_per_s)


PATIENCE = DeliveryPatience()


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
    payload: Payload,
    chunks: SharedChunks,
    *,
    python: str = "python3",
    dry_run: bool = False,
    on_progress: OnDeliveryProgress = lambda progress: None,
    patience: DeliveryPatience = PATIENCE,
) -> Delivery:
    """Send the machine the missing part of `payload`; with `dry_run`, only determine that part.

    Sources are read through `chunks`, which all machines of one deploy share. Raises InputError for a source
    that changes meanwhile or an occupied destination, RemoteCommandError with the machine's own message when
    it cannot write, or for an answer that breaks the rules, UnreachableError, and DeadlineError after
    `patience`. The next deploy then continues partial objects; an incomplete object never has its final name.
    """
    if not payload.objects and not payload.trees:
        return Delivery(0, 0, 0)
    command = build_receiver_command(python, payload.build_request(dry_run=dry_run))
    with closing(session.converse(command)) as conversation:
        return _Exchange(session, payload, conversation, chunks, dry_run, on_progress, patience).run()


class _Exchange:
    """The host's side of a conversation with a receiver."""

    def __init__(
        self,
        session: Session,
        payload: Payload,
        conversation: Conversation,
        chunks: SharedChunks,
        dry_run: bool,
        on_progress: OnDeliveryProgress,
        patience: DeliveryPatience,
    ) -> None:
        self._node = session.name
        self._meter = session.meter
        self._payload = payload
        self._conversation = conversation
        self._chunks = chunks
        self._dry_run = dry_run
        self._on_progress = on_progress
        self._patience = patience
        self._clock = patience.start(payload)
        sizes = [stored.source.size for stored in payload.objects]
        self._answers = ReceiverAnswers(sizes, has_manifest=bool(payload.packed), is_dry_run=dry_run)
        self._sent: set[StoreObject] = set()
        self._bytes_sent = 0

    def run(self) -> Delivery:
        """Serve the receiver's requests until it is done."""
        while True:
            match self._read():
                case Done():
                    self._conversation.wait(deadline_s=self._patience.response_s)
                    num_sent = len(self._sent)
                    return Delivery(num_sent, self._bytes_sent, len(self._payload.objects) - num_sent)
                case Refused(message, remedy):
                    raise InputError(message, remedy=remedy, node=self._node)
                case Damaged(numbers):
                    raise self._damaged([self._payload.objects[number] for number in numbers])
                case SystemFailure() as failure:
                    raise self._failure(failure)
                case ManifestWanted():
                    self._send(iter([self._payload.packed]))
                case Missing(offsets):
                    self._send_missing(
                        {self._payload.objects[number]: start for number, start in offsets.items()}
                    )

    def _read(self) -> ReceiverAnswer:
        """Return the next answer that is not a heartbeat; raises CsdctlError when the receiver ends."""
        while True:
            self._check_clock()
            try:
                line = self._conversation.read_line(
                    deadline_s=min(self._patience.response_s, self._clock.left_s)
                )
            except EOFError:
                raise self._ended() from None
            elapsed_s = self._clock.seconds - self._clock.left_s
            answer = self._answers.read(Answer.parse(line, self._node, _DOING), elapsed_s)
            if answer is not None:
                return answer

    def _check_clock(self) -> None:
        if self._clock.has_passed:
            raise DeadlineError(
                f"{_DOING} took more than {self._clock.seconds:.0f} s",
                node=self._node,
                remedy="check its disk and its network, or leave it out: --exclude",
            )

    def _send_missing(self, missing: dict[StoreObject, int]) -> None:
        """Send each object of `missing` from its byte on; in a dry run only count them."""
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
                    self._check_clock()
                    part = chunk[start : start + SEND_BYTES]
                    self._conversation.send_bytes(part)
                    sent += len(part)
                    self._on_progress(DeliveryProgress(self._node, sent, num_bytes))
            except EOFError:
                break
        if num_bytes:
            self._bytes_sent += sent

    def _failure(self, failure: SystemFailure) -> RemoteCommandError:
        where = f" at {failure.path}" if failure.path else ""
        return RemoteCommandError(
            f"{_DOING} failed{where}: {failure.words}",
            node=self._node,
            remedy=_REMEDIES.get(failure.error_number, "check the disk there: `df -h`, `mount`"),
        )

    def _damaged(self, damaged: list[StoreObject]) -> CsdctlError:
        for stored in damaged:
            if SharedChunks(0).hash_source(stored.source.path).sha256 != stored.source.sha256:
                return changed(stored.source.path)
        return NodeError(
            f"{len(damaged)} of {len(self._payload.objects)} files arrived damaged twice",
            node=self._node,
            remedy="check that machine for failing disk or memory, then retry",
        )

    def _ended(self) -> CsdctlError:
        """Return why the receiver ended without a response; raises UnreachableError for a lost connection."""
        done = self._conversation.wait(deadline_s=self._patience.response_s)
        try:
            done.check(
                self._node,
                doing=_DOING,
                remedy="the machine needs Python 3.8 or newer: set `python:` in fleet.yaml",
            )
        except RemoteCommandError as error:
            return error
        return RemoteCommandError(f"{_DOING} ended without a response", node=self._node)
