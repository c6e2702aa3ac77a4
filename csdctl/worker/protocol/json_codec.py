"""Dataclasses as JSON, with a schema version: the encoding of everything that csdctl and its worker exchange.

Both sides carry this package, so that a version mismatch is detected and named.
"""

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

SCHEMA = 2
"""Incremented whenever a field changes its name or meaning; each side refuses another schema."""


ANSWER_PREFIX = "@csdctl-answer "
"""Prefix of the line on standard output with which `build`, `prepare` and `digest` answer."""


PROGRESS_PREFIX = "@csdctl-working "
"""Prefix of the lines on standard output with which `prepare` reports a `PrepareProgress`."""


WORKER_ERROR_PREFIX = "@csdctl-error "
"""Prefix of the line on standard error with which these commands fail."""


class ProtocolError(ValueError):
    """What the other side sent does not match this version of the protocol."""


MessageT = TypeVar("MessageT")


def to_json(value: Any) -> str:
    """Return a dataclass as one line of JSON."""
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"), allow_nan=True)


def from_json(message_type: type[MessageT], text: str) -> MessageT:
    """Parse the `message_type` that `to_json` wrote; raises ProtocolError for other text."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ProtocolError(
            f"expected a {message_type.__name__} as JSON, received {text[:80]!r}: {error}"
        ) from None
    if isinstance(content, dict) and content.get("schema", SCHEMA) != SCHEMA:
        raise ProtocolError(
            f"{message_type.__name__}: received schema {content['schema']}, expected {SCHEMA}"
        )
    result: MessageT = from_dict(message_type, content)
    return result


def from_dict(message_type: Any, content: Any) -> Any:
    """Return the dataclass `message_type` from parsed JSON, by its annotations; raises ProtocolError."""
    if not isinstance(content, dict):
        raise ProtocolError(f"expected a {message_type.__name__}, received {content!r}")
    hints = typing.get_type_hints(message_type)
    unknown = set(content) - set(hints)
    if unknown:
        raise ProtocolError(f"{message_type.__name__}: unknown {', '.join(sorted(unknown))}")
    try:
        return message_type(**{name: _value(hints[name], value) for name, value in content.items()})
    except TypeError as error:
        raise ProtocolError(f"{message_type.__name__}: {error}") from None


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value)
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        return _value(inner[0], value) if len(inner) == 1 else value
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in value)
    return value
