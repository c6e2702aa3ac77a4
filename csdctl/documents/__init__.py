"""Files of YAML and JSON: read within limits and checked, written so that they survive a power cut.

Files may come from strangers: size, depth, number of values and number of reported problems are bounded. A
file may be a device, a link to one, or larger than memory. YAML has only the values of JSON: dates, octal
numbers, and YAML 1.1's `yes` and `on`, are text. Other tags and merge keys are errors.
"""

import contextlib
import difflib
import errno
import fcntl
import functools
import json
import os
import re
import stat
from collections.abc import Hashable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, cast, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, InstanceOf, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from csdctl.errors import InputError
from csdctl.notify import Say
from csdctl.worker.protocol.disk_errors import describe_os_error
from csdctl.worker.protocol.durable_files import make_directory, save_bytes, sync
from csdctl.worker.protocol.json_codec import add_check, is_unchanged, remove_check

MAX_TEXT_BYTES = 2 << 20
"""Size of a file written by people; the plan of 4,000 ranks has a third of it."""
MAX_LINE = 10_000
"""Characters in a line of a file whose format has lines."""
MAX_JSON_BYTES = 16 << 20
"""Size of a JSON file written by csdctl; the facts of 1,000 machines have a third of it."""

AGAIN = "remove it, and create it again"
_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Where the shell puts the output of `<(command)`."""

MAX_PROBLEMS = 20
"""Number of problems that are reported of one document."""
MAX_SHOWN = 60
"""Characters of a key or a value in a message."""
_CONTENTS = {
    type(None): "an empty file",
    list: "a list",
    int: "a number",
    float: "a number",
    bool: "true or false",
}
"""Names of a document that has no keys and values, by its Python type. All other types are text."""
_PLAIN_WORDS = {
    "a valid dictionary": "keys with values, such as {key: value}",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "a valid number": "a number",
}
"""Words of pydantic's messages, and what csdctl says instead."""

VALUE_SIZE = 40
MAX_SIZE = 4 << 20
"""Characters of all keys and values of a document, aliases expanded; each counts as `VALUE_SIZE` more."""
MAX_DIGITS = 18
"""Digits of an integer: it fits in 64 bits, as in other languages that read JSON."""
MAX_SCALAR = 4096
"""Characters of one key or value; no path may be longer."""
MAX_DEPTH = 40
"""Levels of nesting, aliases expanded."""
_TAG = "tag:yaml.org,2002:"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")
"""Characters that no value may have. Surrogates that stand for the bytes of a path (PEP 383) are allowed."""

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Rules of a file that the user writes: unknown keys are errors, and numbers are finite.

A dataclass of the standard library gets them by `@with_config(STRICT)`, with all dataclasses in it."""

ValueT = TypeVar("ValueT")
_adapter = functools.cache(TypeAdapter)


def load_text(
    path: Path, *, max_bytes: int = MAX_TEXT_BYTES, remedy: str = "", errors: str = "strict"
) -> str:
    """Read a UTF-8 file. Raises InputError if it is missing, no regular file, too large or no text."""
    try:
        with open_regular(path, is_pipe_allowed=str(path).startswith(_DESCRIPTORS)) as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", remedy=remedy) from None
    if len(content) > max_bytes:
        raise InputError(
            f"{path} has more than {max_bytes:,} bytes, the most that csdctl reads of such a file"
        )
    try:
        return content.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} cannot be read: byte {error.start} is not UTF-8 text", remedy="save it as UTF-8"
        ) from None


def split_lines(text: str, name: str) -> list[str]:
    """Return lines that end at line feeds. Raises InputError, which has `name`, for a very long line."""
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            raise InputError(f"{name}:{number}: {len(line):,} characters, expected at most {MAX_LINE:,}")
    return lines


def open_regular(path: Path, flags: int = os.O_RDONLY, *, is_pipe_allowed: bool = False) -> BinaryIO:
    """Open a file, unbuffered unless it is to be read. Raises FileNotFoundError.

    Raises InputError when it cannot be opened, or is no regular file: others may have put it there, and
    reading it may block or never end.
    """
    is_reading, remedy = flags == os.O_RDONLY, "mend or remove it"
    try:
        # Without O_NONBLOCK, opening a named pipe waits for its other end.
        descriptor = os.open(path, flags | os.O_CLOEXEC | (0 if is_pipe_allowed else os.O_NONBLOCK), 0o600)
        if is_pipe_allowed or stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, *(("rb", -1) if is_reading else ("a+b", 0)))
        os.close(descriptor)
        raise IsADirectoryError if path.is_dir() else ValueError("it is not a regular file")
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        is_of_csdctl = ".csdctl" in path.parts
        problem = "it is a directory"
        remedy = "move it away" if is_of_csdctl else f"name a file in it, such as {path}/FILE"
    except (OSError, ValueError) as error:
        problem = str(error.strerror if isinstance(error, OSError) else error).lower()
        remedy = (isinstance(error, OSError) and describe_os_error(error, path)[1]) or remedy
    raise InputError(f"cannot {'read' if is_reading else 'write'} {path}: {problem}", remedy=remedy)


def open_log(path: Path, say: Say = lambda line: None, *, is_shared: bool = False) -> BinaryIO:
    """Open a file of lines to append, and sync its name. Raises as `open_regular`. A cut last line ends.

    `is_shared`: other processes append, too, so that it is locked until it is closed, if that is possible.
    """
    make_directory(path.parent)
    file = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    if is_shared:
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
    size = os.fstat(file.fileno()).st_size
    if not size:
        sync(path.parent)
    elif os.pread(file.fileno(), 1, size - 1) != b"\n":
        say(f"warning: {path}: its last line was cut")
        file.write(b"\n")
    return file


def append_lines(path: Path, lines: bytes, say: Say = lambda line: None, *, is_synced: bool = True) -> None:
    """Append whole lines in one write. Raises OSError, and what `open_log` raises."""
    with open_log(path, say) as file:
        if file.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if is_synced:
            os.fsync(file.fileno())


def load_json(path: Path, *, remedy: str = AGAIN) -> Any:
    """Read a JSON file written by csdctl. Raises InputError when it is missing, damaged or too large."""
    content = load_text(path, max_bytes=MAX_JSON_BYTES, remedy=remedy).rstrip().encode()
    if not is_unchanged(content):
        raise InputError(f"{path} was changed: it does not match its checksum, `check`", remedy=remedy)
    return parse_json_document(remove_check(content).decode(), str(path), remedy=remedy)


def parse_json_document(text: str, name: str, *, remedy: str = AGAIN) -> Any:
    """Parse JSON `text`. `name` identifies it in the InputError for text that is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else f"not valid JSON: {error}"
        raise InputError(f"{name} cannot be read: {problem}", remedy=remedy) from None


def check_output(path: Path, option: str, *, force: bool = True) -> None:
    """Raise InputError unless a file can be written to `path`, which the user gave with `option`."""
    parent = path.expanduser().parent
    if parent.exists() and not parent.is_dir():
        raise InputError(f"{option} {path}: {parent} is not a directory", remedy="choose another path")
    if not parent.is_dir():
        raise InputError(f"{option} {path}: directory {parent} does not exist", remedy="create it first")
    if path.is_dir():
        raise InputError(f"{option} {path} is a directory", remedy=f"name a file, such as {path}/FILE")
    if path.exists() and not path.is_file():
        raise InputError(f"{option} {path} is a device or a pipe", remedy="name a regular file")
    if not os.access(parent, os.W_OK):
        raise InputError(f"{option} {path}: no permission to write to {parent}", remedy="choose another path")
    if path.exists() and not force:
        raise InputError(f"{path} already exists", remedy=f"overwrite it with --force, or change {option}")


def save_json(path: Path, content: object, indent: int | None = 2) -> None:
    """Write a dict or a dataclass as JSON with a checksum. It survives a power cut. Raises OSError."""
    document = json.dumps(content, indent=indent, sort_keys=True, default=to_jsonable_python).encode()
    save_bytes(path, (add_check(document)[0] if content else document) + b"\n")


class Document(BaseModel):
    """Base of a file that the user writes, as an immutable model of pydantic."""

    model_config = STRICT | ConfigDict(frozen=True)


def load_document(path: Path, expected: type[ValueT], *, remedy: str = "") -> ValueT:
    """Read a YAML file as a dataclass or a model of pydantic. Raises InputError with file and line."""
    return parse_document(
        load_text(path, remedy=remedy or f"create {path} or use another file"), expected, name=str(path)
    )


def parse_document(text: str, expected: type[ValueT], *, name: str) -> ValueT:
    """Parse YAML `text` as `expected`. `name` identifies it in error messages."""
    tree, content = parse_yaml(text, name)
    adapter: TypeAdapter[ValueT] = _adapter(cast(Hashable, expected))
    if not isinstance(content, dict):
        raise InputError(
            f"{name}: expected keys such as {_name_keys(adapter.json_schema())}, "
            f"received {_CONTENTS.get(type(content), 'text')}",
            remedy=f"use a file with these keys, or fix {name}",
        )
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        problems = [f"{name}{_describe(problem, tree, adapter)}" for problem in error.errors()[:MAX_PROBLEMS]]
        if error.error_count() > MAX_PROBLEMS:
            problems.append(f"{name}: and {error.error_count() - MAX_PROBLEMS:,} more problems")
    raise InputError("\n".join(problems), remedy=f"fix {name}")


def check_values(content: object, expected: type[ValueT], name: str, *, remedy: str = AGAIN) -> ValueT:
    """Return parsed JSON as a dataclass or model. Raises InputError naming the first wrong value."""
    try:
        checked: ValueT = _adapter(cast(Hashable, expected)).validate_python(content)
        return checked
    except ValidationError as error:
        problem = error.errors()[0]
        raise InputError(f"{name}{_describe(problem, None, None)}", remedy=remedy) from None
    except UnicodeEncodeError as error:  # of a message
        raise InputError(f"{name}: {error.object[:MAX_SHOWN]!a} is not text", remedy=remedy) from None


def check_fields(options: Any) -> None:
    """Check the fields of a frozen dataclass, and of dataclasses in them, by their annotations.

    Values are converted as in files, such as a list to a tuple. Raises InputError naming the first wrong one.
    """
    remedy = f"see help(csdctl.{type(options).__name__}); early stopping is part of the job's recipe"
    exact: Any = InstanceOf  # a dict would be taken, with unknown keys left out
    for part in (options, *filter(is_dataclass, vars(options).values())):
        for name, hint in get_type_hints(type(part)).items():
            expected = exact[hint] if is_dataclass(hint) else hint
            value = check_values(getattr(part, name), expected, name, remedy=remedy)
            object.__setattr__(part, name, value)


def load_kept(path: Path, expected: type[ValueT]) -> ValueT | None:
    """Return what csdctl keeps at `path` to save work. None where it is missing, or not as `expected`."""
    with contextlib.suppress(InputError):
        return check_values(load_json(path), expected, str(path))
    return None


def _describe(problem: Any, tree: yaml.Node | None, adapter: TypeAdapter[Any] | None) -> str:
    location: tuple[str | int, ...] = problem["loc"]
    line = _line_of(tree, location)
    key = _shorten(".".join(str(part) for part in location))
    where = f":{line}: " if line else ": "
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a dataclass
        schema = adapter.json_schema() if adapter else {}
        parts = (schema, *schema.get("$defs", {}).values())
        keys = {name for part in parts for name in part.get("properties", {})}
        name = str(location[-1])[:MAX_SHOWN]
        nearest = difflib.get_close_matches(name, keys, 1, 0.7) or sorted(keys & {*name.split("_")})
        hint = f", did you mean `{nearest[0]}`?" if nearest else ""
        return f"{where}unknown key `{key}`{hint}"
    if problem["type"] == "missing":
        return f"{where}key `{key}` is missing"
    received = problem["input"]
    text = ""
    if received is None or isinstance(received, str | int | float):
        text = f" (received {'nothing' if received is None else _shorten(repr(received))})"
    message = describe_value_problem(problem)
    if adapter and (name := problem.get("ctx", {}).get("class_name")):  # where keys and values are expected
        message = f"must have keys such as {_name_keys(adapter.json_schema()['$defs'][name])}"
    return f"{where}{f'`{key}`: ' if key else ''}{_shorten(message, 5 * MAX_SHOWN)}{text}"


def _name_keys(schema: dict[str, Any]) -> str:
    """Return three keys of an object, those first that it must have."""
    return ", ".join(list(dict.fromkeys([*schema.get("required", ()), *schema["properties"]]))[:3])


def describe_value_problem(problem: Any) -> str:
    """Return the message of a pydantic error, without what only its authors need."""
    message: str = problem["msg"].removeprefix("Value error, ")  # before what a validator raised
    message = message.partition(", unable to parse")[0].replace("Input should be", "must be")
    for words, plain in _PLAIN_WORDS.items():
        message = message.replace(words, plain)
    return message


def _shorten(text: str, most: int = MAX_SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _line_of(node: yaml.Node | None, location: Sequence[str | int]) -> int | None:
    """Return the line (from 1) of the deepest existing part of `location`."""
    line = None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, node = key.start_mark.line + 1, value
                    break
            else:
                break
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


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
        if control := _CONTROL.search(text):
            _refuse(event, f"character U+{ord(control[0]):04X} is not allowed")
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
    """Return nodes and value of a YAML document, None if it is empty. Raises InputError with the line."""
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
    if "but got '['" in problem:
        problem += '; quote ranges: "csd[0-35]"'
    where = f"{name}{f':{line}' if line else ''}"
    raise InputError(f"{where}: not valid YAML: {problem}", remedy=f"fix {name}")


def _refuse(where: yaml.Node | yaml.Event, problem: str) -> NoReturn:
    mark: Any = where.start_mark
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
