"""Values that the ranks of a group tell each other, as JSON, and the checks before one is used.

What another rank has sent is not trusted: it is parsed here alone, and each value passes a check of its
receiver, which returns it as it may be used and raises ValueError or TypeError for anything else.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from csdctl.worker.group.channel import PeerFaultError

T = TypeVar("T")
Check = Callable[[Any], T]

_SHOWN = 60
_HASH = re.compile(r"[0-9a-f]{64}")


def encode_value(value: Any) -> bytes:
    """Return `value` as JSON; NaN and infinity are not part of it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decode_value(content: bytes | bytearray) -> Any:
    """Parse one value; raises ValueError, also for NaN, infinity, and brackets nested too deeply."""
    try:
        return json.loads(bytes(content), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decode_values(contents: Sequence[bytes], check: Check[T]) -> list[T]:
    """Return the checked value of every rank; raises PeerFaultError, which names the first rank at fault."""
    values = []
    for rank, content in enumerate(contents):
        try:
            values.append(check(decode_value(content)))
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            shown = repr(content[:_SHOWN]).removeprefix("b")
            raise PeerFaultError(rank, f"sent {shown}, which is not allowed: {error}") from None
    return values


def as_none(value: Any) -> None:
    """Check a value that only says that its rank has come this far."""
    if value is not None:
        raise ValueError("expected null")


def as_hash(value: Any) -> str:
    """Check a SHA-256 in hex."""
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError("expected a SHA-256 in hex")
    return value


def as_count(value: Any, largest: int) -> int:
    """Check an integer from 0 to `largest`."""
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"expected an integer from 0 to {largest}")
    return value


def is_minority(ranks: Sequence[int], size: int) -> bool:
    """Return whether these are some ranks of a group of `size`, and fewer than half of them."""
    return 0 < 2 * len(ranks) < size


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN]} is not allowed")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
