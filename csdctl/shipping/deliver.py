"""Deliver a payload to one machine: a command there reports missing objects and receives only those.

If nothing is missing, this takes one round trip. The other end is `standalone/receive.py`.

An answer that breaks the rules ends the delivery to that machine: RemoteCommandError. They bound the number
of answers too: every object is requested at most MAX_ROUNDS times.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from csdctl.errors import CsdctlError, NodeError
from csdctl.shipping.payload import Payload
from csdctl.shipping.store import CHUNK_BYTES, StoredFile, changed, hash_source, read_chunk
from csdctl.transport.commands import build_program_command
from csdctl.transport.program import Nothing, Patience, Program
from csdctl.transport.session import Session
from csdctl.worker.protocol.json_codec import (
    PROGRESS,
    RESULT,
    Count,
    MaxLength,
    ProtocolError,
    ShortText,
    shorten,
)

MAX_ROUNDS = 2
"""A receiver requests an object that arrived damaged once more (MAX_TRIES there)."""

MAX_RANGES = 20_000
MAX_DAMAGED = 100
# A node gets its first files before its own Python is installed; until then python3 is used.
_START = 'command -v -- "$1" >/dev/null 2>&1 || { shift; set -- python3 "$@"; }; exec "$@"'
SEND_BYTES = 256 * 1024
_DOING = "receiving files"
_REMEDY = (
    "check its disk and its network, and its Python (3.8 or newer: `python:` in fleet.yaml), or --exclude it"
)
RESPONSE_S = 60.0
WHOLE_S = 900.0
BYTES_PER_S = 128 * 1024


@dataclass(frozen=True)
class Missing:
    """A request for objects: those of `ranges`, and the byte to start from if it is not the first."""

    ranges: Annotated[tuple[tuple[Count, Count], ...], MaxLength(MAX_RANGES)]
    """First and last number of the objects, ascending."""
    resume: dict[ShortText, Count]


@dataclass(frozen=True)
class Damaged:
    """Objects, by number, that arrived damaged in every round."""

    numbers: Annotated[tuple[Count, ...], MaxLength(MAX_DAMAGED)]


ANSWERS: dict[str, type] = {PROGRESS: Nothing, "missing": Missing, "damaged": Damaged, RESULT: Nothing}


class RequestedObjects:
    """Checks the requests of one receiver for objects, in order."""

    def __init__(self, sizes: Sequence[int], *, is_dry_run: bool) -> None:
        """`sizes` are those of the offered objects."""
        self._sizes = sizes
        self._rounds_left = 1 if is_dry_run else MAX_ROUNDS
        self._allowed = set(range(len(sizes)))
        """Numbers that may be requested in this round: those of the round before."""

    def add(self, request: Missing) -> dict[int, int]:
        """Return the bytes to start from by number of the object. Raises ProtocolError."""
        if not self._rounds_left:
            raise ProtocolError("received another request for objects after the last one")
        numbers: list[int] = []
        for first, last in request.ranges:
            least = numbers[-1] + 1 if numbers else 0
            if not least <= first <= last < len(self._sizes):
                raise ProtocolError(
                    f"received a request for objects {shorten(first)} to {shorten(last)}, expected ascending "
                    f"numbers from {least} to {len(self._sizes) - 1}"
                )
            numbers += range(first, last + 1)
        if not self._allowed.issuperset(numbers):
            raise ProtocolError("received a second request for objects that were not sent")
        resume = dict(request.resume)
        offsets = {number: resume.pop(str(number), 0) for number in numbers}
        if resume or any(offset and offset >= self._sizes[number] for number, offset in offsets.items()):
            raise ProtocolError("received an offset outside of a requested object")
        self._allowed = set(numbers)
        self._rounds_left -= 1
        return offsets


def build_receiver(python: str, request: Mapping[str, Any]) -> tuple[list[str], bytes]:
    """Return the argument list that serves `request` on a machine, and that request, packed."""
    packed = zlib.compress(json.dumps(request, separators=(",", ":")).encode(), 1)
    program = build_program_command(python, "receive", [str(len(packed))])
    return ["sh", "-c", _START, "csdctl-receive", *program], packed


"""The deadline of one answer: a receiver sends a heartbeat every second, so this detects one that hangs."""
"""The deadline of a delivery: more than the receiver waits for another deploy to end (LOCK_WAIT_S there)."""
"""Added to the whole: the time for all bytes at this rate, which is slower than a usable link or disk."""


@dataclass(frozen=True)
class Delivery:
    """The result of a delivery to one machine, or of a dry run."""

    num_sent: int
    bytes_sent: int
    num_present: int


@dataclass(frozen=True)
class DeliveryProgress:
    """The progress of one machine. `bytes_total` is the size of its missing objects."""

    node: str
    bytes_sent: int
    bytes_total: int


OnDeliveryProgress = Callable[[DeliveryProgress], None]


def deliver(
    session: Session,
    payload: Payload,
    *,
    python: str = "python3",
    dry_run: bool = False,
    on_progress: OnDeliveryProgress = lambda progress: None,
    patience: Patience | None = None,
) -> Delivery:
    """Send the machine the missing part of `payload`. With `dry_run`, only determine that part.

    Raises InputError for a source that changes meanwhile or an occupied destination, RemoteCommandError when
    the machine cannot write or answers otherwise, UnreachableError, and DeadlineError after `patience`.
    """
    if not payload.objects and not payload.trees:
        return Delivery(0, 0, 0)
    command, first = build_receiver(python, {**payload.manifest, "dry_run": dry_run})
    whole_s = WHOLE_S + sum(stored.size for stored in payload.objects) / BYTES_PER_S
    patience = patience or Patience(RESPONSE_S, whole_s, whole_s)
    with closing(Program(session, command, _DOING, patience, _REMEDY)) as program:
        exchange = _Exchange(session, payload, program, dry_run, on_progress)
        exchange.send(iter([first]))
        try:
            return exchange.serve()
        except ProtocolError as error:
            raise program.error(str(error)) from None


@dataclass
class _Exchange:
    """The host's side of a conversation with a receiver."""

    session: Session
    payload: Payload
    program: Program
    is_dry_run: bool
    on_progress: OnDeliveryProgress
    sent: set[StoredFile] = field(default_factory=set)
    bytes_sent: int = 0

    def serve(self) -> Delivery:
        """Serve the receiver's requests until it is done. Raises ProtocolError."""
        objects = self.payload.objects
        requested = RequestedObjects([one.size for one in objects], is_dry_run=self.is_dry_run)
        while True:
            kind, answer = self.program.read(ANSWERS)
            if kind == "missing":
                starts = requested.add(answer)
                self._send_missing({objects[number]: start for number, start in starts.items()})
            elif kind == "damaged":
                raise self._damaged(answer)
            elif kind == RESULT:
                self.program.finish()
                num_sent = len(self.sent)
                return Delivery(num_sent, self.bytes_sent, len(objects) - num_sent)

    def _send_missing(self, missing: dict[StoredFile, int]) -> None:
        self.sent |= missing.keys()
        if self.is_dry_run:
            self.bytes_sent = sum(stored.size for stored in missing)
        else:
            total = sum(stored.size - start for stored, start in missing.items())

            def report(sent: int) -> None:
                self.on_progress(DeliveryProgress(self.session.name, sent, total))

            report(0)
            self.bytes_sent += self.send(self._content(missing), report)

    def _content(self, missing: dict[StoredFile, int]) -> Iterator[bytes]:
        """Yield the bytes of `missing`: large files in chunks, small files combined."""
        gathered = bytearray()
        for stored, begin in missing.items():
            for start in range(begin - begin % CHUNK_BYTES, stored.size, CHUNK_BYTES):
                chunk = read_chunk(stored, start)[max(0, begin - start) :]
                self.session.meter.record(stored.traffic_class, sent=len(chunk))
                if len(gathered) + len(chunk) <= SEND_BYTES:
                    gathered += chunk
                    continue
                yield bytes(gathered)
                gathered.clear()
                yield chunk
        yield bytes(gathered)

    def send(self, content: Iterator[bytes], report: Callable[[int], None] = lambda sent: None) -> int:
        """Send `content`. Return its bytes. A receiver that ends early says why in its next response."""
        sent = 0
        with suppress(EOFError):
            for chunk in content:
                for start in range(0, len(chunk), SEND_BYTES):
                    self.program.check_clock()
                    part = chunk[start : start + SEND_BYTES]
                    self.program.conversation.send_bytes(part)
                    sent += len(part)
                    report(sent)
        return sent

    def _damaged(self, damaged: Damaged) -> CsdctlError:
        objects, numbers = self.payload.objects, set(damaged.numbers)
        if not numbers.issubset(range(len(objects))):
            raise ProtocolError("received a report of damage of objects that were not offered")
        for number in numbers:
            stored = objects[number]
            if hash_source(stored.source).sha256 != stored.sha256:
                return changed(stored.source)
        return NodeError(
            f"{len(numbers)} of {len(objects)} files arrived damaged twice",
            node=self.session.name,
            remedy="check that machine for failing disk or memory, then retry",
        )
