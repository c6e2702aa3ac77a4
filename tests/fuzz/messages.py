"""Targets of fuzzing that nodes and ranks send: events, orders, answers, outputs of probes, values."""

import contextlib
import dataclasses
import json
import typing
from itertools import count
from pathlib import Path
from typing import Any

from csdctl.errors import RemoteCommandError
from csdctl.facts.machine import CONDITION_FACTS, ClockTrip, parse_facts
from csdctl.fleet.facts import Condition
from csdctl.shipping.deliver import ANSWERS, check_request
from csdctl.supervision.rank_processes import EventValidator
from csdctl.transport.program import ReportedError, decode_frame
from csdctl.worker.group.hub import Lost
from csdctl.worker.group.values import decode_value, encode_value
from csdctl.worker.protocol import events as protocol
from csdctl.worker.protocol.json_codec import DATA, ERROR, Count, ProtocolError, Sha256, from_json, to_json
from csdctl.worker.protocol.model_info import CutTimes, PartTimes
from csdctl.worker.protocol.orders import Ping
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.protocol.sandbox import SandboxPolicy
from csdctl.worker.tasks.callbacks import Decision
from csdctl.worker.tasks.progress import CallbackState
from tests.fuzz.documents import NODES, run_spec
from tests.fuzz.target import Form, Target

CAPTURES = Path(__file__).parents[1] / "unit" / "facts" / "captures"
CONDITION = b"""\
csdctl-fact:addresses
  |-- 10.1.1.10
     /32 host LOCAL
csdctl-fact:limits
Max open files            1024                 1048576              files
pids.max 100
pids.current 20
csdctl-fact:mounts
/opt
csdctl-fact:places
place /root
space /dev/sda1 1000 500 500 50% /
inodes /dev/sda1 1000 500 500 50% /
place /tmp
refused mktemp: failed: Read-only file system
"""


def _lines(content: bytes) -> list[str]:
    """Return the lines of an input, as they arrive."""
    return content.decode(errors="replace").split("\n")


def _live_events(content: bytes, directory: Path) -> None:
    clock = count()
    conducts: dict[int, EventValidator] = {}
    for line in _lines(content):
        event = protocol.event_from_line(line)
        if event is None:
            continue
        rank = event.rank % len(NODES)
        if rank not in conducts:
            conducts[rank] = EventValidator(rank, NODES, num_epochs=3)
            conducts[rank].note_order(Ping(7))
        conducts[rank].check(event, len(line), float(next(clock)))
        protocol.event_to_line(event)


def _live_event_seeds() -> list[bytes]:
    joined = protocol.Joined(0, "host", 1, 0, 10, 0, {"0": 4, "1": 4, "2": 4}, is_start=True)
    events: list[protocol.Event] = []
    for rank, node in enumerate(NODES):
        events += [protocol.Ready(rank, node, 100), *([] if rank else [joined])]
        of_all = () if rank else (80, 1.5, 0.5)
        events += [
            protocol.Progress(rank, node, 1, 2, 2, 8, 0.5, 0.1, 0.6, *of_all),
            protocol.EpochEnd(rank, node, 1, 10, 40, 1.0, 0.1, 1.1, "0" * 64, *of_all),
            protocol.Pong(rank, node, 7),
            protocol.Finished(rank, node, 1, 10, "0" * 64, 1 << 30),
        ]
    one_of_each = [_simplest(protocol.EVENTS[name]) for name in sorted(protocol.EVENTS)]
    return [
        "\n".join(map(protocol.event_to_line, events)).encode(),
        *(protocol.event_to_line(event).encode() for event in one_of_each),
    ]


def _simplest(event_type: type[protocol.Event]) -> protocol.Event:
    """Return an event whose required fields have some valid value."""
    plain: dict[Any, Any] = {int: 1, float: 0.5, str: "host", tuple: (), dict: {"0": 4}}
    hints = typing.get_type_hints(event_type)
    values = {
        field.name: plain.get(typing.get_origin(hints[field.name]) or hints[field.name], 0.5)
        for field in dataclasses.fields(event_type)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return event_type(**{**values, "rank": 0, "node": "host"})


def _frames(content: bytes, directory: Path) -> None:
    for line in _lines(content):
        frame = decode_frame(line, {**ANSWERS, ERROR: ReportedError, DATA: bytes})
        if frame and frame[0] == "missing":
            check_request(frame[1], 5)


FRAMES = b"""\
a line of a library
@csdctl-progress {}
@csdctl-missing {"marks": ["110", "10"]}
@csdctl-damaged {"number": 3}
@csdctl-error {"message": "it is locked", "remedy": "wait", "exit_code": 2}
@csdctl-data YWJj
@csdctl-result {}"""


def _probe_outputs(content: bytes, directory: Path) -> None:
    text = content.decode(errors="replace")
    trips = [ClockTrip(1000.0, 0.1, text[-30:]), ClockTrip(1000.0, 0.2, "1000.5")]
    facts = parse_facts("csd0", text, trips, CONDITION_FACTS, Condition)
    json.dumps(dataclasses.asdict(facts), default=str)
    str((facts.num_threads, facts.usable_memory_bytes))


def _specs(content: bytes, directory: Path) -> None:
    text = content.decode()
    kinds: dict[str, Any] = {'"is_confined"': SandboxPolicy, "evaluation_s": PartTimes}
    kind = next((kind for word, kind in kinds.items() if word in text), RunSpec)
    to_json(from_json(kind, text))


def _spec_seeds() -> list[bytes]:
    policy = SandboxPolicy(("/bin/sh", "-c", "true"), True, "ab" * 16, ("10.0.0.0/8",), ("csdctl/x/0",))
    times = PartTimes(0.5, 0.1, 0.0, (CutTimes("block", 0.1, 0.2, 0.2),))
    return [to_json(each).encode() for each in (run_spec(), policy, times)]


def _group_values(content: bytes, directory: Path) -> None:
    num_allowed = 0
    for hint in (type(None), Sha256, Decision | None, Lost, Count):
        try:
            decode_value(hint, bytearray(content))
            num_allowed += 1
        except ValueError as error:
            fault = error
    try:
        value = decode_value(Any, content)
    except ValueError:
        value = None
    with contextlib.suppress(ValueError):  # NaN
        encode_value(value)
    if not num_allowed:
        raise fault


def _value_seeds() -> list[bytes]:
    decision = [dataclasses.asdict(CallbackState(1.5, 1)), True]
    values = (None, "0a" * 32, 7, decision, [[2, "its link was lost", False]])
    return [encode_value(value) for value in values]


MARKS = tuple(f"csdctl-fact:{fact.name}\n".encode() for fact in CONDITION_FACTS)
INVALID = (ProtocolError,)
TARGETS = (
    Target("live-events", Form.LINES, _live_events, INVALID, _live_event_seeds),
    Target("receiver-answers", Form.LINES, _frames, INVALID, lambda: [FRAMES, *FRAMES.split(b"\n")]),
    Target(
        *("probe-outputs", Form.LINES, _probe_outputs, (RemoteCommandError,)),
        lambda: [path.read_bytes() + CONDITION for path in sorted(CAPTURES.glob("*.txt"))],
        MARKS,
    ),
    Target("specs", Form.JSON, _specs, (ProtocolError, UnicodeDecodeError), _spec_seeds),
    Target("group-values", Form.JSON, _group_values, (ValueError,), _value_seeds),
)
