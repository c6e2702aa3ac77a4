"""What a machine answered, with a type and a bound for every value that is taken from it.

A node's answer is input: it may be damaged, of another version, or made up. Whatever is not as expected
becomes a RemoteCommandError that names the node, the value and what was expected; it concerns that node only.
"""

import json
from typing import Any

from csdctl.errors import RemoteCommandError

MAX_TEXT_LENGTH = 1000
"""Longer texts are cut: they are shown to the user, and never used as a name or a path."""

MAX_NUMBER = 1 << 62


class Answer:
    """One JSON object; `doing` begins the message of every error."""

    def __init__(self, content: dict[str, Any], node: str, doing: str) -> None:
        self.content = content
        """The values as they were received."""
        self._node = node
        self._doing = doing

    @classmethod
    def parse(cls, text: str, node: str, doing: str, *, remedy: str = "") -> "Answer":
        """Read one line or output, of a length that the transport has bounded; raises RemoteCommandError."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise RemoteCommandError(
                f"{doing}: received {text[:80]!r}, expected a JSON object", node=node, remedy=remedy
            )
        return cls(content, node, doing)

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def text(self, key: str, default: str | None = None, max_length: int = MAX_TEXT_LENGTH) -> str:
        """Return a string, cut at `max_length`; without a default it must be there."""
        return str(self._take(key, str, "a text", default))[:max_length]

    def number(self, key: str, low: int = 0, high: int = MAX_NUMBER, default: int | None = None) -> int:
        """Return an integer of `low` … `high`."""
        return self._check_range(key, self._take(key, int, "an integer", default), low, high)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        return bool(self._take(key, bool, "true or false"))

    def items(self, key: str, max_items: int) -> list[Any]:
        """Return a list of any values."""
        values: list[Any] = self._take(key, list, "a list")
        if len(values) > max_items:
            raise self.error(f"received {len(values)} {key}, expected at most {max_items}")
        return values

    def texts(self, key: str, max_items: int) -> list[str]:
        """Return a list of strings, each cut at MAX_TEXT_LENGTH."""
        return [text[:MAX_TEXT_LENGTH] for text in self._typed_items(key, max_items, str, "texts")]

    def numbers(self, key: str, max_items: int, low: int = 0, high: int = MAX_NUMBER) -> list[int]:
        """Return a list of integers of `low` … `high`."""
        found = self._typed_items(key, max_items, int, "integers")
        return [self._check_range(key, number, low, high) for number in found]

    def objects(self, key: str, max_items: int) -> "list[Answer]":
        """Return a list of objects."""
        found = self._typed_items(key, max_items, dict, "objects")
        return [Answer(content, self._node, self._doing) for content in found]

    def part(self, key: str) -> "Answer":
        """Return an object inside of this one."""
        return Answer(self._take(key, dict, "an object"), self._node, self._doing)

    def part_or_none(self, key: str) -> "Answer | None":
        """Return an object inside of this one, or None for null."""
        is_null = key in self.content and self.content[key] is None
        return None if is_null else self.part(key)

    def counts(self, key: str, max_items: int, high: int = MAX_NUMBER) -> dict[str, int]:
        """Return an object whose values are integers from 0 to `high`."""
        inner = self.part(key)
        if len(inner.content) > max_items:
            raise self.error(f"received {len(inner.content)} {key}, expected at most {max_items}")
        return {name: inner.number(name, 0, high) for name in inner.content}

    def error(self, problem: str) -> RemoteCommandError:
        """Return the error for this answer."""
        return RemoteCommandError(
            f"{self._doing}: {problem}", node=self._node, remedy="check what runs on that machine"
        )

    def _take(self, key: str, kind: type, words: str, default: object = None) -> Any:
        value = self.content.get(key, default)
        if not _is_a(value, kind):
            raise self.error(f"received {_show(value)} as `{key[:80]}`, expected {words}")
        return value

    def _typed_items(self, key: str, max_items: int, kind: type, words: str) -> list[Any]:
        values = self.items(key, max_items)
        for value in values:
            if not _is_a(value, kind):
                raise self.error(f"received {_show(value)} in `{key[:80]}`, expected {words}")
        return values

    def _check_range(self, key: str, number: int, low: int, high: int) -> int:
        if not low <= number <= high:
            raise self.error(f"received {_show(number)} as `{key[:80]}`, expected {low} to {high}")
        return number


def _is_a(value: object, kind: type) -> bool:
    """Whether `value` has type `kind`; true is no integer here, as in JSON."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _show(value: object) -> str:
    """Return a value for a message; of a list or an object only what it is, however deep it may be."""
    if value is None:
        return "nothing"
    return type(value).__name__ if isinstance(value, list | dict) else repr(value)[:80]
