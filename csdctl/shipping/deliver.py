"""Deliver a payload to one machine: a command there reports missing objects and receives only those.

If nothing is missing, this takes one round trip. The other end is `standalone/receive.py`. An invalid answer
ends the delivery to that machine with a RemoteCommandError.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from csdctl.errors import NodeError
from csdctl.shipping.payload import Payload
from csdctl.shipping.store import CHUNK_BYTES, StoredFile, changed, hash_source, read_chunk
from csdctl.transport.commands import build_program_command
from csdctl.transport.program import AnswerLimits, Nothing, Program
from csdctl.transport.session import SLICE_BYTES, Session
from csdctl.worker.protocol.json_codec import (
    PROGRESS,
    RESULT,
    Count,
    MaxLength,
    ProtocolError,
    ShortText,
    shorten,
)

MAX_TRIES = 2
"""A file that arrived damaged is sent once more: it may continue a part from before a power cut."""
MAX_RANGES = 20_000
MAX_DAMAGED = 100
RESPONSE_S = 60.0
"""The deadline of one answer. A receiver sends a heartbeat every second, so this detects one that hangs."""
WHOLE_S = 900.0
"""The deadline of a delivery without files: more than the receiver waits for another deploy to end."""
BYTES_PER_S = 128 * 1024
"""The time of all bytes at this rate is added to WHOLE_S. A usable link or disk is faster."""
# A node gets its first files before csdctl's Python is installed there. Until then python3 is used.
_START = 'command -v -- "$1" >/dev/null 2>&1 || { shift; set -- python3 "$@"; }; exec "$@"'
_REMEDY = (
    "check its disk and its network, and its Python (3.8 or newer: `python:` in fleet.yaml), or leave it out"
)


@dataclass(frozen=True)
class Missing:
    """A request for objects by number. `resume`: the bytes to start from, by number, unless that is 0."""

    ranges: Annotated[tuple[tuple[Count, Count], ...], MaxLength(MAX_RANGES)]
    """First and last number of the objects, ascending."""
    resume: dict[ShortText, Count]


@dataclass(frozen=True)
class Damaged:
    """Numbers of objects that arrived damaged."""

    numbers: Annotated[tuple[Count, ...], MaxLength(MAX_DAMAGED)]


ANSWERS: dict[str, type] = {PROGRESS: Nothing, "missing": Missing, "damaged": Damaged, RESULT: Nothing}


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
    patience: AnswerLimits | None = None,
) -> Delivery:
    """Send the machine the missing part of `payload`. With `dry_run`, only determine that part.

    Raises InputError for a source that changes meanwhile or an occupied destination, RemoteCommandError when
    the machine cannot write or answers otherwise, UnreachableError, and DeadlineError after `patience`.
    """
    if not payload.objects and not payload.trees:
        return Delivery(0, 0, 0)
    command, request = build_receiver(python, {**payload.manifest, "dry_run": dry_run})
    whole_s = WHOLE_S + sum(stored.size for stored in payload.objects) / BYTES_PER_S
    patience = patience or AnswerLimits(RESPONSE_S, whole_s, whole_s)
    transfer = _Transfer(session, payload, dry_run, on_progress)
    for _ in range(MAX_TRIES):
        with closing(Program(session, command, "receiving files", patience, _REMEDY)) as program:
            try:
                damaged = transfer.serve(program, request)
            except ProtocolError as error:
                raise program.error(str(error)) from None
        if not damaged:
            num_sent = len(transfer.sent)
            return Delivery(num_sent, transfer.bytes_sent, len(payload.objects) - num_sent)
        for stored in damaged:
            if hash_source(stored.source).sha256 != stored.sha256:
                raise changed(stored.source)
    raise NodeError(
        f"{len(damaged)} of {len(payload.objects)} files arrived damaged twice",
        node=session.name,
        remedy="check that machine for failing disk or memory, then retry",
    )


def build_receiver(python: str, request: Mapping[str, Any]) -> tuple[list[str], bytes]:
    """Return the argument list that serves `request` on a machine, and that request, packed."""
    packed = zlib.compress(json.dumps(request, separators=(",", ":")).encode(), 1)
    program = build_program_command(python, "receive", [str(len(packed))])
    return ["sh", "-c", _START, "csdctl-receive", *program], packed


def check_request(request: Missing, sizes: Sequence[int]) -> dict[int, int]:
    """Return the byte to start from by number of the object. Raises ProtocolError.

    `sizes`: of the objects that were offered.
    """
    numbers: list[int] = []
    for first, last in request.ranges:
        least = numbers[-1] + 1 if numbers else 0
        if not least <= first <= last < len(sizes):
            raise ProtocolError(
                f"received a request for objects {shorten(first)} to {shorten(last)}, expected ascending "
                f"numbers from {least} to {len(sizes) - 1}"
            )
        numbers += range(first, last + 1)
    resume = dict(request.resume)
    offsets = {number: resume.pop(str(number), 0) for number in numbers}
    if resume or any(offset and offset >= sizes[number] for number, offset in offsets.items()):
        raise ProtocolError("received an offset outside of a requested object")
    return offsets


@dataclass
class _Transfer:
    """The host's side of the conversations with a receiver."""

    session: Session
    payload: Payload
    is_dry_run: bool
    on_progress: OnDeliveryProgress
    sent: set[StoredFile] = field(default_factory=set)
    bytes_sent: int = 0

    def serve(self, program: Program, request: bytes) -> list[StoredFile]:
        """Send the request and the missing files. Return those that arrived damaged. Raises ProtocolError."""
        objects = self.payload.objects
        _send(program, [request])
        kind, answer = _read(program)
        if kind == "missing":
            offsets = check_request(answer, [stored.size for stored in objects])
            self._send_missing(program, {objects[number]: offset for number, offset in offsets.items()})
            kind, answer = _read(program)
        if kind == "missing":
            raise ProtocolError("received a second request for objects")
        if kind == "damaged":
            if not answer.numbers or max(answer.numbers) >= len(objects):
                raise ProtocolError("received a report of damage of objects that were not offered")
            return [objects[number] for number in set(answer.numbers)]
        program.finish()
        return []

    def _send_missing(self, program: Program, offsets: dict[StoredFile, int]) -> None:
        self.sent |= offsets.keys()
        total = sum(stored.size - offset for stored, offset in offsets.items())
        if self.is_dry_run:
            self.bytes_sent = total
            return

        def report(num_bytes: int) -> None:
            self.on_progress(DeliveryProgress(self.session.name, num_bytes, total))

        report(0)
        self.bytes_sent += _send(program, self._read_files(offsets), report)

    def _read_files(self, offsets: dict[StoredFile, int]) -> Iterator[bytes]:
        """Yield the bytes of files from their offsets on: large files in chunks, small files combined."""
        gathered = bytearray()
        for stored, offset in offsets.items():
            for start in range(offset - offset % CHUNK_BYTES, stored.size, CHUNK_BYTES):
                chunk = read_chunk(stored, start)[max(0, offset - start) :]
                self.session.meter.record(stored.traffic_class, sent=len(chunk))
                if len(gathered) + len(chunk) <= SLICE_BYTES:
                    gathered += chunk
                    continue
                yield bytes(gathered)
                gathered.clear()
                yield chunk
        yield bytes(gathered)


def _read(program: Program) -> tuple[str, Any]:
    """Return the next frame that is no heartbeat."""
    while (frame := program.read(ANSWERS))[0] == PROGRESS:
        pass
    return frame


def _send(
    program: Program, content: Iterable[bytes], report: Callable[[int], None] = lambda num_bytes: None
) -> int:
    """Send `content`. Return its bytes. A receiver that ends early says why in its next response."""
    num_bytes = 0
    with suppress(EOFError):
        for chunk in content:
            for start in range(0, len(chunk), SLICE_BYTES):
                program.check_clock()
                part = chunk[start : start + SLICE_BYTES]
                program.conversation.send_bytes(part)
                num_bytes += len(part)
                report(num_bytes)
    return num_bytes
