"""YAML as a tree of nodes with lines, within limits, and the values in it.

Aliases count as often as they are used, before anything is built from them. The values are those of JSON:
text, numbers, true, false, null, lists, and mappings with text as keys. Dates, octal, sexagesimal and
hexadecimal numbers, and YAML 1.1's `yes` and `on`, are text. Other tags and merge keys are errors.
"""

import re
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from csdctl.documents.text import MAX_DIGITS
from csdctl.errors import InputError

MAX_VALUES = 100_000
"""Keys and values of a document, aliases expanded."""
MAX_CHARACTERS = 4 << 20
"""Of all keys and values of a document, aliases expanded."""
MAX_SCALAR = 4096
"""Characters of one key or value; no path may be longer."""
MAX_DEPTH = 40

_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT, _STR = (_TAG + name for name in ("null", "bool", "int", "float", "str"))
_PATTERNS = {
    _NULL: (re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    _BOOL: (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    _INT: (re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z"), list("-+0123456789")),
    # A point and the exponent's sign are necessary, because PyYAML writes the text `12e4` without quotes.
    _FLOAT: (
        re.compile(
            r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        list("-+0123456789."),
    ),
}
_MERGE = "<<"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass
class _Size:
    """Size of a part of a tree, aliases expanded."""

    values: int = 0
    characters: int = 0
    depth: int = 0


class _Composer(
    yaml.reader.Reader,
    yaml.scanner.Scanner,
    yaml.parser.Parser,
    yaml.composer.Composer,
    yaml.resolver.BaseResolver,
):
    """Composes the tree of one document; raises MarkedYAMLError as soon as a limit is exceeded."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        yaml.resolver.BaseResolver.__init__(self)
        self._total = _Size()
        self._level = 0
        self._sizes: dict[int, _Size] = {}
        """By the id of a node that is complete."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node, and add its size."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            size = self._sizes.get(id(node))
            if size is None:
                refuse(event, f"alias `*{event.anchor}` is part of what it stands for")
            self._add(event, size)
            return node
        length = len(event.value) if isinstance(event, yaml.ScalarEvent) else 0
        if length > MAX_SCALAR:
            refuse(event, f"a value of {length:,} characters, expected at most {MAX_SCALAR:,}")
        total, before = self._total, _Size(self._total.values, self._total.characters, self._total.depth)
        total.depth = 0
        self._add(event, _Size(1, length, 1))
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        self._sizes[id(node)] = _Size(
            total.values - before.values, total.characters - before.characters, total.depth - self._level
        )
        total.depth = max(before.depth, total.depth)
        return node

    def _add(self, event: yaml.Event, size: _Size) -> None:
        total = self._total
        total.values += size.values
        total.characters += size.characters
        total.depth = max(total.depth, self._level + size.depth)
        for found, limit, what in (
            (total.values, MAX_VALUES, "values"),
            (total.characters, MAX_CHARACTERS, "characters of keys and values"),
            (total.depth, MAX_DEPTH, "levels of nesting"),
        ):
            if found > limit:
                refuse(event, f"{found:,} {what} with all aliases expanded, expected at most {limit:,}")


_Composer.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _PATTERNS.items():
    _Composer.add_implicit_resolver(_tag, _pattern, _first)


def refuse(where: yaml.Node | yaml.Event, problem: str) -> NoReturn:
    """Raise the MarkedYAMLError of a problem at `where`."""
    mark: Any = where.start_mark
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def compose(text: str, name: str) -> yaml.Node | None:
    """Return the tree of a YAML document, None if it is empty; raises InputError with the line.

    `name` identifies the text in messages.
    """
    try:
        return _Composer(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise invalid(name, line, f"character U+{_code(error.character):04X} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        raise invalid(name, _line(error), str(error.problem)) from None
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF"
        raise invalid(name, None, str(error)) from None


def build(tree: yaml.Node | None, name: str) -> Any:
    """Return the value of a tree; raises InputError with the line of a part that JSON cannot express."""
    try:
        return None if tree is None else _build(tree, {})
    except yaml.MarkedYAMLError as error:
        raise invalid(name, _line(error), str(error.problem)) from None


def invalid(name: str, line: int | None, problem: str) -> InputError:
    """Return the error of text that is not valid YAML, or not valid here."""
    return InputError(f"{name}{f':{line}' if line else ''}: not valid YAML: {problem}")


def _code(character: str | int) -> int:
    return character if isinstance(character, int) else ord(character)


def _line(error: yaml.MarkedYAMLError) -> int | None:
    return error.problem_mark.line + 1 if error.problem_mark else None


def _build(node: yaml.Node, built: dict[int, Any]) -> Any:
    if id(node) not in built:
        if isinstance(node, yaml.ScalarNode):
            built[id(node)] = _build_scalar(node)
        elif isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            built[id(node)] = [_build(item, built) for item in node.value]
        elif isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            built[id(node)] = _build_mapping(node, built)
        else:
            _refuse_tag(node)
    return built[id(node)]


def _build_mapping(node: yaml.MappingNode, built: dict[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in node.value:
        name = _build(key, built)
        if not isinstance(name, str):
            what = f"`{key.value[:40]}`" if isinstance(key, yaml.ScalarNode) else "with several parts"
            refuse(key, f"key {what} is not text: write it in quotes")
        if name == _MERGE:
            refuse(key, "merge keys (`<<`) are not supported: write the keys themselves")
        if name in content:
            refuse(key, f"duplicate key `{name[:40]}`")
        content[name] = _build(value, built)
    return content


def _build_scalar(node: yaml.ScalarNode) -> Any:
    text, tag = node.value, node.tag
    if tag not in (*_PATTERNS, _STR):
        _refuse_tag(node)
    if found := _CONTROL.search(text):
        refuse(node, f"character U+{ord(found[0]):04X} is not allowed")
    if tag == _STR:
        return text
    if not _PATTERNS[tag][0].match(text):  # with an explicit tag, as in `!!int many`
        refuse(node, f"`{text[:40]}` does not fit its tag !!{tag.removeprefix(_TAG)}")
    if tag == _INT:
        num_digits = len(text.lstrip("+-"))
        if num_digits > MAX_DIGITS:
            refuse(node, f"a number of {num_digits:,} digits, expected at most {MAX_DIGITS}")
        return int(text)
    if tag == _FLOAT:
        # Models refuse what is not finite, with the key's name.
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return None if tag == _NULL else text.lower() == "true"


def _refuse_tag(node: yaml.Node) -> NoReturn:
    shown = node.tag.replace(_TAG, "!!")[:80]
    refuse(node, f"tag {shown!r}: only values that JSON has are allowed")
