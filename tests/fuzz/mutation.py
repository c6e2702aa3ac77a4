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
            change = {
                Form.LINES: self._change_lines,
                Form.JSON: self._change_json,
                Form.YAML: self._change_yaml,
            }
            changed = change[self._form](content.decode(errors="surrogateescape"))
            content = content if changed is None else _encode(changed)
            if self._random.random() < 0.8:
                return content[:MAX_BYTES]
        for _ in range(self._random.choice((1, 1, 1, 2, 4, 16))):
            content = self._change_bytes(content, pool)
        return content[:MAX_BYTES]

    def _change_lines(self, text: str) -> str:
        lines = text.split("\n")
        for _ in range(self._random.choice((1, 1, 2, 4))):
            number, second = self._random.randrange(len(lines)), self._random.randrange(len(lines))
            choice = self._random.random()
            if choice < 0.1:
                lines.insert(second, lines[number])
            elif choice < 0.2 and len(lines) > 1:
                del lines[number]
            elif choice < 0.3:
                lines[number], lines[second] = lines[second], lines[number]
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
            tree = self._change_tree(yaml.load(text, _LOADER))
            if self._random.random() < 0.3:
                return self._dump_json(tree)
            style = self._random.choice((*[None] * 12, '"', "'", "|", ">"))  # numbers become texts
            options: Any = {"default_style": style, "allow_unicode": True, "sort_keys": False}
            return str(yaml.dump(tree, Dumper=_DUMPER, **options))
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
        old, choice = parent[key], self._random.random()
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
        choice = self._random.choice
        values: tuple[Any, ...] = (
            *(choice(TEXTS), choice(NUMBERS), "".join(self._random.choices(TEXTS, k=2))),
            choice((None, True, False, [], {}, [[]], [{}], {"": None}, [None])),
            self._random.choices(NUMBERS, k=self._random.randrange(5)),
            {choice(TEXTS): choice(NUMBERS) for _ in range(3)},
        )
        return choice(values)

    def _change_text(self, text: str) -> str:
        start = text.find("{")
        if start >= 0 and self._random.random() < 0.8:
            changed = self._change_json(text[start:])
            if changed is not None:
                return text[:start] + changed
        position, words = self._random.randint(0, len(text)), text.split(" ")
        head, tail = text[:position], text[position:]
        words[self._random.randrange(len(words))] = str(self._random.choice((*TEXTS, *NUMBERS[:18])))
        texts = [
            head + self._random.choice(TEXTS) + tail,
            head + tail[self._random.randint(1, 8) :],
            " ".join(words),
            head + chr(self._random.choice((0, 9, 27, 0xE9, 0x2028, 0xD800, 0x1F980))),
            (text * self._random.choice((2, 3, 50)))[:MAX_BYTES],
        ]
        return self._random.choices(texts, (3, 2, 2, 1, 2))[0]

    def _change_bytes(self, content: bytes, pool: Sequence[bytes]) -> bytes:
        choice, position = self._random.choice, self._random.randint(0, len(content))
        size = min(choice((1, 1, 2, 4, 8, 64, 1000)), len(content) - position)
        head, part, tail = content[:position], content[position : position + size], content[position + size :]
        width, order, spliced = choice((1, 2, 4, 8)), choice(("little", "big")), choice(pool)
        number = choice([number for number in NUMBERS if isinstance(number, int)]) % (1 << 8 * width)
        start = self._random.randint(0, len(spliced))
        flipped = bytes(byte ^ 1 << self._random.randrange(8) for byte in part[:1])
        return choice(
            (
                head,
                head + tail,
                head + part * choice((2, 3, 100)) + tail,
                head + choice(self._words) + part + tail,
                head + choice(self._words) + tail,
                head + number.to_bytes(width, order) + content[position + width :],
                head + self._random.randbytes(size) + tail,
                head + flipped + part[1:] + tail,
                head + spliced[start : start + choice((4, 64, 100_000))] + tail,
            )
        )


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
