"""Load YAML with PyYAML's safe loader, restricted to the values of JSON and bounded in size.

Values are text, numbers, true, false, null, lists, and mappings with text as keys. Dates, octal, sexagesimal
and hexadecimal numbers, and YAML 1.1's `yes` and `on`, are text. Other tags and merge keys are errors.
"""

import re
from typing import Any, NoReturn

import yaml

from csdctl.errors import InputError

MAX_SIZE = 4 << 20
"""Characters of all keys and values of a document, aliases expanded; each counts as `VALUE_SIZE` more."""
VALUE_SIZE = 40
MAX_DIGITS = 18
"""Digits of an integer: it fits in 64 bits, as in other languages that read JSON."""
MAX_SCALAR = 4096
"""Characters of one key or value; no path may be longer."""
MAX_DEPTH = 40
"""Levels of nesting, aliases expanded."""

_TAG = "tag:yaml.org,2002:"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """Safe loader with limits. Aliases count as often as they are used, before any value is built."""

    yaml_implicit_resolvers = {}
    yaml_constructors = {
        tag and _TAG + tag: yaml.SafeLoader.yaml_constructors[tag and _TAG + tag]
        for tag in ("null", "bool", "int", "float", "str", "seq", "map", None)
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._size = self._level = self._deepest = 0
        self._complete: dict[int, tuple[int, int]] = {}
        """Size and depth by the id of a node."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node; raises MarkedYAMLError as soon as a limit is exceeded."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._complete:
                _refuse(event, f"alias `*{event.anchor}` is part of what it stands for")
            self._add(event, *self._complete[id(node)])
            return node
        text = event.value if isinstance(event, yaml.ScalarEvent) else ""
        if len(text) > MAX_SCALAR:
            _refuse(event, f"a value of {len(text):,} characters, expected at most {MAX_SCALAR:,}")
        if found := _CONTROL.search(text):
            _refuse(event, f"character U+{ord(found[0]):04X} is not allowed")
        size_before, deepest_before, self._deepest = self._size, self._deepest, 0
        self._add(event, VALUE_SIZE + len(text), 1)
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        self._complete[id(node)] = self._size - size_before, self._deepest - self._level
        self._deepest = max(self._deepest, deepest_before)
        if node and node.tag == _TAG + "int" and len(text) > MAX_DIGITS + 1:
            _refuse(event, f"a number of {len(text):,} digits, expected at most {MAX_DIGITS}")
        return node

    def _add(self, event: yaml.Event, size: int, depth: int) -> None:
        self._size += size
        self._deepest = max(self._deepest, self._level + depth)
        if self._size > MAX_SIZE:
            _refuse(event, f"with all aliases expanded, its values have more than {MAX_SIZE:,} characters")
        if self._deepest > MAX_DEPTH:
            _refuse(event, f"{self._deepest} levels of nesting, expected at most {MAX_DEPTH}")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; raises MarkedYAMLError for a key that is not text, or is there twice."""
        names = set()
        for key, _ in node.value:
            if key.tag != _TAG + "str":
                what = f"`{key.value[:40]}`" if isinstance(key, yaml.ScalarNode) else "with several parts"
                _refuse(key, f"key {what} is not text: write it in quotes")
            if key.value == "<<":
                _refuse(key, "merge keys (`<<`) are not supported: write the keys themselves")
            if key.value in names:
                _refuse(key, f"duplicate key `{key.value[:40]}`")
            names.add(key.value)
        return super().construct_mapping(node, deep)


for _name, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)\Z", list("-+0123456789")),
    # A point and the exponent's sign are necessary, because PyYAML writes the text `12e4` without quotes.
    (
        "float",
        r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)


def parse_yaml(text: str, name: str) -> tuple[yaml.Node | None, Any]:
    """Return nodes and value of a YAML document, None if it is empty; raises InputError with the line.

    `name` identifies the text in messages.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        problem = str(error.problem)[:300]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"character U+{error.character:04X} is not allowed"
    except (ValueError, OverflowError, LookupError) as error:  # "\UFFFFFFFF", or `!!int many`
        line, problem = None, str(error)[:300]
    if "'\\t'" in problem:
        problem += "; indent with spaces"
    where = f"{name}{f':{line}' if line else ''}"
    raise InputError(f"{where}: not valid YAML: {problem}", remedy=f"fix {name}")


def _refuse(where: yaml.Node | yaml.Event, problem: str) -> NoReturn:
    mark: Any = where.start_mark
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
