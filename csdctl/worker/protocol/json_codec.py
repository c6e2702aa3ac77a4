"""Dataclasses as JSON, with a schema version: the encoding of everything that csdctl and its worker exchange.

Text from another machine is checked before anything uses it: size and nesting of the text, then the types,
lengths and ranges of the dataclass's annotations: `Annotated[int, Between(0, 9)]`.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import reprlib
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

MAX_RANKS = 1 << 16
SCHEMA = 2
"""Incremented whenever a field changes its name or meaning; each side refuses another schema."""
FRAME_PREFIX = "@csdctl-"
"""A frame is a line of this, its kind, a space, and JSON; of data, base64. Other lines are for people."""
MAX_JSON_CHARS = 16 << 20
"""A longer text is not parsed: the run spec of thousands of ranks has less."""
MAX_DEPTH = 32
"""A more deeply nested text is not parsed: the standard parser would exhaust the stack."""
MAX_STRING_CHARS = 1 << 16
MAX_ITEMS = 1 << 18
"""The limit of a tuple or a dict: the classes of a data set are the most of anything."""
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.?)*+"?|[\[{]|[\]}]', re.DOTALL)
"""Strings and brackets. A string that does not end takes the rest of the text, so that no text is slow."""
_ABRIDGED = reprlib.Repr()
_CHECK = b',"check":"%08x"}'
CHECK_BYTES = len(_CHECK % 0)
"""The end of an object whose content is checked by its CRC-32."""


@dataclass(frozen=True)
class Bound:
    """A condition on a value, in words and as a check."""

    text: str
    allows: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the schema by which pydantic checks the condition too, in job.yaml and files of csdctl."""
        check = {"type": "no-info", "function": self._checked}
        return {"type": "function-after", "function": check, "schema": handler(source)}

    def _checked(self, value: Any) -> Any:
        if not self.allows(value):
            raise ValueError(f"expected {self.text}")
        return value


def Between(minimum: float, maximum: float) -> Bound:
    """Return the bound of a number from `minimum` to `maximum`, both included."""
    return Bound(f"{minimum:,} to {maximum:,}", lambda value: minimum <= value <= maximum)


def OneOf(values: tuple[str, ...]) -> Bound:
    """Return the bound of a text that is one of `values`."""
    return Bound("one of " + ", ".join(map(repr, values)), lambda value: value in values)


def MaxLength(length: int, minimum: int = 0) -> Bound:
    """Return the bound of a text or tuple of `minimum` to `length` characters or items."""
    text = f"a length of {minimum} to {length}" if minimum else f"a length of at most {length}"
    return Bound(text, lambda value: minimum <= len(value) <= length)


class AnyNumber:
    """NaN and the infinities are numbers too. Without this annotation, a float is finite."""


Count = Annotated[int, Between(0, 1 << 53)]
"""A number of things; exact as a float too."""
NumSteps = Annotated[int, Between(1, 1 << 53)]
Positive = Annotated[float, Bound("a number above 0", lambda value: value > 0)]
Fraction = Annotated[float, Bound("a number above 0 and below 1", lambda value: 0 < value < 1)]
BatchSize = Annotated[int, Between(1, 1 << 31)]
RankNumber = Annotated[int, Between(0, MAX_RANKS - 1)]
PingNumber = Annotated[int, Between(0, 1 << 31)]
"""It tells one ping from another: the answer has the same."""
Epoch = Annotated[int, Between(0, 1 << 31)]
"""From 1; 0 before the first."""
ExitCode = Annotated[int, Between(0, 255)]
Seconds = Annotated[float, Between(0.0, 1e9)]
Measured = Annotated[float, AnyNumber]
"""Computed from data or from other ranks' numbers: NaN when a training diverges."""
Sha256 = Annotated[
    str, Bound("a SHA-256 in hex", lambda value: re.fullmatch("[0-9a-f]{64}", value) is not None)
]
ShortText = Annotated[str, MaxLength(256)]
"""A name, a hash, a reason."""
Shape = Annotated[tuple[Annotated[int, Between(0, 1 << 31)], ...], MaxLength(32)]
"""The shape of an array; 0 for any size."""


PROGRESS, RESULT, ERROR, DATA = "progress", "result", "error", "data"
"""Kinds of frames: a heartbeat, the answer to a request, or why there is none, and bytes before it."""


_ABRIDGED.maxstring = _ABRIDGED.maxother = 80


class ProtocolError(ValueError):
    """The other side's message does not match this version of the protocol."""


MessageT = TypeVar("MessageT")


def to_json(value: Any) -> str:
    """Return a dataclass as one line of JSON."""
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"), allow_nan=True)


def add_check(document: bytes, before: int = 0) -> tuple[bytes, int]:
    """Return an object of JSON with its checksum, and the checksum, which begins with `before`."""
    check = zlib.crc32(document[:-1], before)
    return document[:-1] + _CHECK % check, check


def read_check(document: bytes) -> int | None:
    """Return the checksum of an object. None: it has none."""
    with contextlib.suppress(ValueError):
        check = int(document[-10:-2], 16)
        return check if document[-CHECK_BYTES:] == _CHECK % check else None
    return None


def compute_check(document: bytes, before: int = 0) -> int:
    """Return the checksum that an object, which ends with one, ought to have."""
    return zlib.crc32(document[:-CHECK_BYTES], before)


def remove_check(document: bytes) -> bytes:
    """Return an object without its checksum, if it has one. It is not compared."""
    return document if read_check(document) is None else document[:-CHECK_BYTES] + b"}"


def is_unchanged(document: bytes) -> bool:
    """Return whether an object has the checksum that it ought to have, or none, as earlier versions wrote."""
    has_check = document[-CHECK_BYTES:].startswith(_CHECK[:10])
    return not has_check or read_check(document) == compute_check(document)


def to_frame(kind: str, content: Any) -> str:
    """Return a dataclass or a dict as a frame."""
    return f"{FRAME_PREFIX}{kind} {json.dumps(content) if isinstance(content, dict) else to_json(content)}"


def parse_json(text: str) -> Any:
    """Parse JSON of another machine. Raises ProtocolError for invalid, too long or too deeply nested text."""
    if len(text) > MAX_JSON_CHARS:
        raise ProtocolError(f"expected at most {MAX_JSON_CHARS:,} characters of JSON, received {len(text):,}")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(text):
        raise ProtocolError(f"expected JSON of at most {MAX_DEPTH} levels, received more: {shorten(text)}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"expected JSON, received {shorten(text)}: {error}") from None


def _is_too_deep(text: str) -> bool:
    steps = ((token[0] in "[{") - (token[0] in "]}") for token in _TOKENS.finditer(text))
    return any(depth > MAX_DEPTH for depth in itertools.accumulate(steps))


def shorten(value: Any) -> str:
    """Return `value` as a message shows it: abridged, on one line, without control characters."""
    return _ABRIDGED.repr(value)


def from_json(message_type: type[MessageT], text: str) -> MessageT:
    """Parse the `message_type` that `to_json` wrote. Raises ProtocolError for other text."""
    content = parse_json(text)
    if isinstance(content, dict) and content.get("schema", SCHEMA) != SCHEMA:
        received = shorten(content["schema"])
        raise ProtocolError(f"{message_type.__name__}: received schema {received}, expected {SCHEMA}")
    result: MessageT = from_dict(message_type, content)
    return result


def to_tagged(tag: str, message: Any) -> dict[str, Any]:
    """Return a dataclass as `tag`, which is its type, and its fields by name."""
    return {tag: type(message).__name__, **dataclasses.asdict(message)}


def from_tagged(tag: str, types: Mapping[str, type[MessageT]], content: Any) -> MessageT:
    """Return the dataclass of one of `types` from parsed JSON. Raises ProtocolError."""
    name = content.get(tag) if isinstance(content, dict) else None
    if not isinstance(name, str) or name not in types:
        article = "an" if tag[0] in "aeiou" else "a"
        raise ProtocolError(f"expected {article} {tag}, received {shorten(content)}")
    fields = {key: value for key, value in content.items() if key != tag}
    message: MessageT = from_dict(types[name], fields)
    return message


def from_dict(message_type: Any, content: Any) -> Any:
    """Return the dataclass `message_type` from parsed JSON, by its annotations. Raises ProtocolError."""
    name = message_type.__name__
    if not isinstance(content, dict):
        raise ProtocolError(f"expected a {name}, received {shorten(content)}")
    readers, required = _readers_of(message_type)
    if unknown := content.keys() - readers.keys():
        raise ProtocolError(f"{name}: unknown {shorten(_names(unknown))}, expected {_names(readers)}")
    if missing := required - content.keys():
        raise ProtocolError(f"{name}: expected {_names(missing)}, received none")
    return message_type(**{field: readers[field](value) for field, value in content.items()})


def read_as(hint: Any, content: Any) -> Any:
    """Return parsed JSON as the annotation `hint` says. Raises ProtocolError."""
    return _reader(hint, "value")(content)


def _names(fields: Iterable[str]) -> str:
    return ", ".join(sorted(fields))


Reader = Callable[[Any], Any]
"""Returns a value of parsed JSON as a field has it, or raises ProtocolError."""


@cache
def _readers_of(message_type: Any) -> tuple[dict[str, Reader], frozenset[str]]:
    """Return the readers of a dataclass's fields, by name, and the names of those without a default."""
    hints = typing.get_type_hints(message_type, include_extras=True)
    missing, fields = dataclasses.MISSING, dataclasses.fields(message_type)
    required = {
        field.name for field in fields if field.default is missing and field.default_factory is missing
    }
    name = message_type.__name__
    return {field: _reader(hint, f"{name}.{field}") for field, hint in hints.items()}, frozenset(required)


@cache
def _reader(hint: Any, where: str) -> Reader:
    """Return the reader of a field with the annotation `hint`. `where` names the field in messages."""
    if dataclasses.is_dataclass(hint):
        return lambda value: from_dict(hint, value)
    if make := _READERS.get(typing.get_origin(hint)):
        return make(typing.get_args(hint), where)
    if hint not in _PLAIN:
        raise TypeError(f"{where} has an annotation that cannot be checked: {hint}")
    return _checked(None, [_PLAIN[hint]], where)


def _checked(read_value: Reader | None, bounds: Sequence[Bound], where: str) -> Reader:
    """Return a reader that checks what `read_value` returns. None: the value itself."""

    def read(value: Any) -> Any:  # a report reads a hundred million values
        content = read_value(value) if read_value else value
        for bound in bounds:
            if not bound.allows(content):
                raise ProtocolError(f"{where}: expected {bound.text}, received {shorten(value)}")
        return content

    return read


def _annotated_reader(arguments: tuple[Any, ...], where: str) -> Reader:
    hint, *metadata = arguments
    if AnyNumber in metadata:
        return _reader(AnyNumber, where)
    bounds = [bound for bound in metadata if isinstance(bound, Bound)]
    if hint in _PLAIN:
        return _checked(None, [_PLAIN[hint], *bounds], where)
    return _checked(_reader(hint, where), bounds, where) if bounds else _reader(hint, where)


def _union_reader(hints: tuple[Any, ...], where: str) -> Reader:
    *readers, last = [_reader(hint, where) for hint in hints if hint is not type(None)]
    may_be_none = type(None) in hints

    def read(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        for read_value in readers:
            with contextlib.suppress(ProtocolError):
                return read_value(value)
        return last(value)

    return read


def _tuple_reader(hints: tuple[Any, ...], where: str) -> Reader:
    read_list = _reader(list, where)
    if hints[-1] is Ellipsis:
        read_item = _reader(hints[0], where)
        return lambda value: tuple(map(read_item, read_list(value)))
    readers = [_reader(hint, where) for hint in hints]
    number = Bound(f"{len(readers)} items", lambda items: len(items) == len(readers))
    read_items = _checked(read_list, [number], where)
    return lambda value: tuple(read(item) for read, item in zip(readers, read_items(value), strict=True))


def _dict_reader(hints: tuple[Any, ...], where: str) -> Reader:
    read_dict, read_key, read_value = (_reader(hint, where) for hint in (dict, *hints))
    return lambda value: {read_key(key): read_value(item) for key, item in read_dict(value).items()}


_READERS: dict[Any, Callable[[tuple[Any, ...], str], Reader]] = {
    Annotated: _annotated_reader,
    typing.Union: _union_reader,
    types.UnionType: _union_reader,
    tuple: _tuple_reader,
    dict: _dict_reader,
}
"""The readers of annotations with arguments, by their origin."""


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 64


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_integer(value)


def _is_at_most(expected: Any, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, expected) and len(value) <= most


_PLAIN: dict[Any, Bound] = {
    Any: Bound("anything", lambda value: True),
    # A whole number may be written without a point; true and false are no numbers.
    float: Bound("a finite number", lambda value: _is_number(value) and math.isfinite(value)),
    AnyNumber: Bound("a number", _is_number),
    int: Bound("an integer of at most 64 bits", _is_integer),
    type(None): Bound("null", lambda value: value is None),
    bool: Bound("true or false", lambda value: isinstance(value, bool)),
    str: Bound(f"text of at most {MAX_STRING_CHARS:,} characters", _is_at_most(str, MAX_STRING_CHARS)),
    list: Bound(f"a list of at most {MAX_ITEMS:,} items", _is_at_most(list, MAX_ITEMS)),
    dict: Bound(f"an object of at most {MAX_ITEMS:,} fields", _is_at_most(dict, MAX_ITEMS)),
}
"""The values that JSON has for a type, within the limits of all messages."""


def without_surrogates(content: Any) -> Any:
    """Return parsed JSON without half characters (lone surrogates), which no terminal and file can take."""
    if isinstance(content, str):
        return content.encode(errors="replace").decode()
    if isinstance(content, list):
        return [without_surrogates(item) for item in content]
    if isinstance(content, dict):
        return {without_surrogates(key): without_surrogates(value) for key, value in content.items()}
    return content
