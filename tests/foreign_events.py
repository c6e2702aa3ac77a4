"""Events as a generator: every value that the annotations of an event allow, the extremes most of all."""

import dataclasses
import math
import re
import typing
from typing import Annotated, Any

from hypothesis import strategies as st

from csdctl.worker.protocol.events import EVENTS, Event
from csdctl.worker.protocol.json_codec import AnyNumber


def events() -> st.SearchStrategy[Event]:
    return st.sampled_from(sorted(EVENTS)).flatmap(lambda name: messages(EVENTS[name]))


def messages(message: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(message, include_extras=True)
    return st.builds(message, **{name: values(hint) for name, hint in hints.items()})


def values(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return messages(hint)
    if origin is Annotated:
        return _within(arguments[0], arguments[1:])
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(st.sampled_from("0129x"), values(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*(st.none() if item is type(None) else values(item) for item in arguments))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        str: st.text(max_size=5),
        int: st.integers(-(1 << 63), (1 << 64) - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
    }
    return plain[hint]


def _within(hint: Any, bounds: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    if AnyNumber in bounds:
        return st.floats() | st.sampled_from([math.nan, math.inf, 0.0])
    for bound in bounds:
        numbers = re.findall(r"-?[\d,]+(?:\.\d+)?", bound.text)
        if bound.text.startswith("one of "):
            return st.sampled_from(re.findall("'([^']*)'", bound.text))
        if bound.text.startswith("a length ") and hint is str:
            return st.sampled_from(["host", "csd0", "csd1", "verified", "x" * int(numbers[-1])])
        if " to " in bound.text and hint in (int, float):
            low, high = (hint(number.replace(",", "")) for number in numbers)
            return st.sampled_from([low, hint(low + 1), high]) | values(hint).filter(bound.allows)
    return values(hint)
