"""Changes of an input: of its bytes, and of the values in its YAML or JSON."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from tests.fuzz.target import Form

MAX_BYTES = 1 << 16
"""Limit for a changed input; sizes have tests of their own."""
NUMBERS = (
    *(0, -1, 1, 2, 127, 255, 256, 65535, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 53, 1 << 62, 1 << 63, 1 << 64),
    *(-(1 << 31), -(1 << 63), 10**18, 10**19, 10**30, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", " ", "host", "csd0", "../../etc/passwd", "/", "~", "~nobody/x", "-", "--help", "a" * 300, "\x00"),
    *("\x1b]52;c;AA\x07", "\u2028", "\x85", "\ud800", "é", "²", "٣", "🦀", "\ufeff", "%s", "{}", "[0-99999]"),
    *("[", "]", "'", '"', "\\", "\r\n", "\n"),
    *["null", "true", "1e999", "0x1f", "1:20", "2026-11-22", "=", "<<"],
    *("csd[0-3]", "csd[00:99]", "10.0.0.0/8", "::1", "fe80::1%eth0", "user@host:22", "x.py:f", "keras:x"),
)
SCRAPS = (
    *b"&a ;*a;<<: *a;!!python/object/apply:os.system [true];!!binary x;!!float x;!!set".split(b";"),
    *b"? [a]\n: b\n;---\n;...\n;%YAML 9.9\n;|\n;>-\n;\t;#;{{ x }};!vault |\n".split(b";"),
    *b"\xff;\xc3\x28;\xed\xa0\x80;\xef\xbb\xbf;\x00;\x85;\\ud800;\\u0000;\n\n".split(b";"),
    *(b"[" * 40, b"{" * 40, b'[{"":' * 200, b"9" * 30, b"9" * 5000, b"1e400", b"NaN", b"-Infinity", b"true"),
)
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class Mutator:
    """Makes inputs from earlier ones; the same seed makes the same."""

    def __init__(self, form: Form, words: Sequence[bytes], seed: object) -> None:
        self._form = form
        self._words = (*SCRAPS, *words)
        self._random = random.Random(repr(seed))

    def next(self, *pools: Sequence[bytes]) -> bytes:
        """Return a change of an input of one of the `pools`, which are equally likely."""
        pool = self._random.choice([pool for pool in pools if pool])
        content = self._random.choice(pool)
        if self._form != Form.BINARY and self._random.random() < 0.8:
            changed = self._change_structure(content)
            content = content if changed is None else changed
            if self._random.random() < 0.8:
                return content[:MAX_BYTES]
        for _ in range(self._random.choice((1, 1, 1, 2, 4, 16))):
            content = self._change_bytes(content, pool)
        return content[:MAX_BYTES]

    def _change_structure(self, content: bytes) -> bytes | None:
        text = content.decode(errors="surrogateescape")
        if self._form == Form.LINES:
            changed: str | None = self._change_lines(text)
        elif self._form == Form.JSON:
            changed = self._change_json(text)
        else:
            changed = self._change_yaml(text)
        return None if changed is None else _encode(changed)

    def _change_lines(self, text: str) -> str:
        lines = text.split("\n")
        for _ in range(self._random.choice((1, 1, 2, 4))):
            number = self._random.randrange(len(lines))
            choice = self._random.random()
            if choice < 0.1:
                lines.insert(self._random.randrange(len(lines) + 1), lines[number])
            elif choice < 0.2 and len(lines) > 1:
                del lines[number]
            elif choice < 0.3:
                other = self._random.randrange(len(lines))
                lines[number], lines[other] = lines[other], lines[number]
            else:
                lines[number] = self._change_text(lines[number])
        return "\n".join(lines)

    def _change_json(self, text: str) -> str | None:
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return self._dump_json(self._change_tree(tree))

    def _dump_json(self, tree: Any) -> str:
        try:
            return json.dumps(tree, ensure_ascii=self._random.random() < 0.7)
        except (ValueError, TypeError, RecursionError):  # a value of itself, or one that only YAML has
            return "0"

    def _change_yaml(self, text: str) -> str | None:
        try:
            tree = yaml.load(text, _LOADER)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            return None
        tree = self._change_tree(tree)
        if self._random.random() < 0.3:
            return self._dump_json(tree)
        style = self._random.choice((*[None] * 12, '"', "'", "|", ">"))  # with a style, numbers become texts
        try:
            dumped = yaml.dump(tree, Dumper=_DUMPER, default_style=style, allow_unicode=True, sort_keys=False)
            return str(dumped)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError, UnicodeError):
            return None

    def _change_tree(self, tree: Any) -> Any:
        root = [tree]
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 8))):
            places = list(_places(root))
            parent, key = self._random.choice(places)
            self._change_at(parent, key, places)
        return root[0]

    def _change_at(self, parent: Any, key: Any, places: Sequence[tuple[Any, Any]]) -> None:
        old = parent[key]
        choice = self._random.random()
        if choice < 0.35:
            parent[key] = self._nasty()
        elif choice < 0.55 and isinstance(old, str):
            parent[key] = self._change_text(old)
        elif choice < 0.65 and isinstance(parent, dict):
            del parent[key]
        elif choice < 0.75 and isinstance(parent, dict):
            parent[self._random.choice((*TEXTS, *map(str, parent)))] = old
        elif choice < 0.85:
            source, place = self._random.choice(places)
            parent[key] = source[place]  # the same object: an alias in YAML, perhaps of itself
        elif choice < 0.92 and isinstance(old, list):
            parent[key] = old[:20] * self._random.choice((0, 2, 3, 40))
        elif isinstance(old, int | float) and not isinstance(old, bool):
            parent[key] = self._random.choice((old + 1, old - 1, -old, str(old), old % 1000 + 0.5, [old]))
        else:
            for _ in range(self._random.choice((1, 2, 30, 60, 400))):
                old = [old] if self._random.random() < 0.5 else {"": old}
            parent[key] = old

    def _nasty(self) -> Any:
        kind = self._random.randrange(6)
        if kind == 0:
            return self._random.choice(TEXTS)
        if kind == 1:
            return self._random.choice(NUMBERS)
        if kind == 2:
            return self._random.choice((None, True, False, [], {}, [[]], [{}], {"": None}, [None]))
        if kind == 3:
            return "".join(self._random.choices(TEXTS, k=2))
        if kind == 4:
            return [self._random.choice(NUMBERS) for _ in range(self._random.randrange(5))]
        return {self._random.choice(TEXTS): self._random.choice(NUMBERS) for _ in range(3)}

    def _change_text(self, text: str) -> str:
        start = text.find("{")
        if start >= 0 and self._random.random() < 0.8:
            changed = self._change_json(text[start:])
            if changed is not None:
                return text[:start] + changed
        position = self._random.randint(0, len(text))
        choice = self._random.random()
        if choice < 0.3:
            return text[:position] + self._random.choice(TEXTS) + text[position:]
        if choice < 0.5:
            return text[:position] + text[position + self._random.randint(1, 8) :]
        if choice < 0.7:
            words = text.split(" ")
            words[self._random.randrange(len(words))] = str(self._random.choice((*TEXTS, *NUMBERS[:18])))
            return " ".join(words)
        if choice < 0.8:
            return text[:position] + chr(self._random.choice((0, 9, 27, 0xE9, 0x2028, 0xD800, 0x1F980)))
        return (text * self._random.choice((2, 3, 50)))[:MAX_BYTES]

    def _change_bytes(self, content: bytes, pool: Sequence[bytes]) -> bytes:
        position = self._random.randint(0, len(content))
        size = min(self._random.choice((1, 1, 2, 4, 8, 64, 1000)), len(content) - position)
        head, cut, tail = content[:position], content[position : position + size], content[position + size :]
        choice = self._random.randrange(9)
        if choice == 0:
            return head + tail
        if choice == 1:
            return head + cut * self._random.choice((2, 3, 100)) + tail
        if choice == 2:
            return head + self._random.choice(self._words) + cut + tail
        if choice == 3:
            return head + self._random.choice(self._words) + tail
        if choice == 4:
            width = self._random.choice((1, 2, 4, 8))
            number = self._random.choice([number for number in NUMBERS if isinstance(number, int)])
            order: Any = self._random.choice(("little", "big"))
            return head + (number % (1 << 8 * width)).to_bytes(width, order) + content[position + width :]
        if choice == 5:
            return head + self._random.randbytes(size) + tail
        if choice == 6 and cut:
            return head + bytes([cut[0] ^ 1 << self._random.randrange(8)]) + cut[1:] + tail
        if choice == 7:
            other = self._random.choice(pool)
            start = self._random.randint(0, len(other))
            return head + other[start : start + self._random.choice((4, 64, 100_000))] + tail
        return head


def _places(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of every value."""
    pending: list[Any] = [root]
    seen: set[int] = set()
    while pending:
        container = pending.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list):
                pending.append(container[key])


def _encode(text: str) -> bytes:
    """Return text as UTF-8; half a character as its three bytes, and an escaped byte as itself."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")
