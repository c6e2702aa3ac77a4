"""Deliver a payload to one machine: a command there reports missing objects and receives only those.

If nothing is missing, this takes one round trip. The other end is `standalone/receive.py`. An invalid answer
ends the delivery to that machine with a RemoteCommandError.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated, Any

from csdctl.errors import CsdctlError, NodeError
from csdctl.shipping.payload import Payload
from csdctl.shipping.store import CHUNK_BYTES, StoredFile, changed, hash_source, read_chunk
from csdctl.transport.commands import build_program_command
from csdctl.transport.program import AnswerLimits, Nothing, Program
from csdctl.transport.session import SLICE_BYTES, Session
from csdctl.worker.protocol.json_codec import PROGRESS, RESULT, Count, MaxLength, ProtocolError, shorten

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
    """A request for objects by number."""

    ranges: Annotated[tuple[tuple[Count, Count], ...], MaxLength(MAX_RANGES)]
    """First and last number of the objects, ascending."""


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
    objects, requested = payload.objects, list[StoredFile]()
    whole_s = WHOLE_S + sum(stored.size for stored in objects) / BYTES_PER_S
    patience = patience or AnswerLimits(RESPONSE_S, whole_s, whole_s)
    with closing(Program(session, command, "receiving files", patience, _REMEDY)) as program:
        try:
            _send(program, [request])
            kind, answer = _read(program, ANSWERS)
            if kind == "missing":
                requested = [objects[number] for number in check_request(answer, len(objects))]
                if not dry_run:
                    _send_files(program, session, requested, on_progress)
                kind, answer = _read(program, {name: ANSWERS[name] for name in ANSWERS if name != "missing"})
            if kind == "damaged" and not (answer.numbers and max(answer.numbers) < len(objects)):
                raise ProtocolError("received a report of damage of objects that were not offered")
            if kind == RESULT:
                program.finish()
        except ProtocolError as error:
            raise program.error(str(error)) from None
    if kind == "damaged":
        raise _explain_damage(session.name, payload, set(answer.numbers))
    num_bytes = sum(stored.size for stored in requested)
    return Delivery(len(requested), num_bytes, len(objects) - len(requested))


def _explain_damage(node: str, payload: Payload, damaged: set[int]) -> CsdctlError:
    for number in damaged:
        stored = payload.objects[number]
        if hash_source(stored.source).sha256 != stored.sha256:
            return changed(stored.source)
    problem = f"{len(damaged)} of {len(payload.objects)} files arrived damaged"
    remedy = "check that machine for failing disk or memory, then retry"
    return NodeError(problem, node=node, remedy=remedy)


def build_receiver(python: str, request: Mapping[str, Any]) -> tuple[list[str], bytes]:
    """Return the argument list that serves `request` on a machine, and that request, packed."""
    packed = zlib.compress(json.dumps(request, separators=(",", ":")).encode(), 1)
    program = build_program_command(python, "receive", [str(len(packed))])
    return ["sh", "-c", _START, "csdctl-receive", *program], packed


def check_request(request: Missing, num_offered: int) -> list[int]:
    """Return the numbers of the requested objects. Raises ProtocolError."""
    numbers: list[int] = []
    for first, last in request.ranges:
        least = numbers[-1] + 1 if numbers else 0
        if not least <= first <= last < num_offered:
            raise ProtocolError(
                f"received a request for objects {shorten(first)} to {shorten(last)}, expected ascending "
                f"numbers from {least} to {num_offered - 1}"
            )
        numbers += range(first, last + 1)
    return numbers


def _send_files(
    program: Program, session: Session, files: Sequence[StoredFile], on_progress: OnDeliveryProgress
) -> None:
    total = sum(stored.size for stored in files)

    def report(num_bytes: int) -> None:
        on_progress(DeliveryProgress(session.name, num_bytes, total))

    def read() -> Iterator[bytes]:
        """Yield the bytes of large files in chunks, of small files combined."""
        gathered = bytearray()
        for stored in files:
            for start in range(0, stored.size, CHUNK_BYTES):
                chunk = read_chunk(stored, start)
                session.meter.record(stored.traffic_class, sent=len(chunk))
                if len(gathered) + len(chunk) <= SLICE_BYTES:
                    gathered += chunk
                    continue
                yield bytes(gathered)
                gathered.clear()
                yield chunk
        yield bytes(gathered)

    report(0)
    _send(program, read(), report)


def _read(program: Program, answers: Mapping[str, type]) -> tuple[str, Any]:
    while (frame := program.read(answers))[0] == PROGRESS:
        pass
    return frame


def _send(
    program: Program, content: Iterable[bytes], report: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Send `content`. A receiver that ends early says why in its next response."""
    num_bytes = 0
    with suppress(EOFError):
        for chunk in content:
            for start in range(0, len(chunk), SLICE_BYTES):
                program.check_clock()
                part = chunk[start : start + SLICE_BYTES]
                program.conversation.send_bytes(part)
                num_bytes += len(part)
                report(num_bytes)
