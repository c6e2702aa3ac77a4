"""Read files written by the user; write files atomically.

`load_document` parses YAML into a pydantic model; all problems become one InputError with line numbers and,
for an unknown key, the nearest known key. `save_text`, `save_json` and `write_atomically` write a temporary
file, sync and rename it, so that a reader never sees a partial file and a crash leaves the old file.
"""

import contextlib
import difflib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from csdctl.errors import InputError


class Document(BaseModel):
    """Base of every file written by the user: unknown keys are errors, numbers finite, values immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


DocumentT = TypeVar("DocumentT", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML with the booleans of YAML 1.2, so that the key `on` stays a string, and without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; raises ConstructorError, with its line, for a duplicate key."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key `{key.value}`", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def load_document(path: Path, model: type[DocumentT]) -> DocumentT:
    """Read the YAML file `path` as `model`; raises InputError with file, line and remedy."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", remedy=f"create {path} or give another file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return parse_document(text, model, name=str(path))


def parse_document(text: str, model: type[DocumentT], *, name: str) -> DocumentT:
    """Parse YAML `text` as `model`; `name` identifies it in error messages."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise InputError(f"{name}{line}: not valid YAML: {problem}") from None
    except ValueError as error:  # for example 2020-13-45, which matches the pattern of a date
        raise InputError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(f"{name}: not valid YAML: nested too deeply") from None
    if not isinstance(content, dict):
        raise InputError(
            f"{name}: expected keys such as {', '.join(list(model.model_fields)[:3])}, "
            f"found {'nothing' if content is None else type(content).__name__}"
        )
    try:
        return model.model_validate(content)
    except ValidationError as error:
        tree = yaml.compose(
            text, Loader=_Loader
        )  # only needed for line numbers; takes half of the parsing time
        problems = [_describe(problem, tree, model) for problem in error.errors()]
    raise InputError("\n".join(f"{name}{problem}" for problem in problems), remedy=f"fix {name}")


def save_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and sync it."""
    save_bytes(path, text.encode())


def save_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically and sync it."""
    with write_atomically(path) as file:
        file.write(content)


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, synced and renamed to `path` on exit; after an error `path` is unchanged."""
    make_directory(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_directory(directory: Path) -> None:
    """Create `directory` and its missing parents, for this user alone, whatever the umask is."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def build_atomically(directory: Path) -> Iterator[Path]:
    """Yield an empty directory whose files are synced and which replaces `directory` on exit.

    After an error `directory` is unchanged.
    """
    make_directory(directory.parent)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_json(path: Path, content: object) -> None:
    """Write `content` as indented JSON, atomically."""
    save_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def load_json(path: Path) -> Any:
    """Read a JSON file written by csdctl; raises InputError when it is missing or truncated."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read: {error}", remedy=f"remove {path} and create it again"
        ) from None


def _describe(problem: Any, tree: yaml.Node | None, model: type[BaseModel]) -> str:
    location: tuple[str | int, ...] = problem["loc"]
    line = _line_of(tree, location)
    key = ".".join(str(part) for part in location)
    where = f":{line}: " if line else ": "
    if problem["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(str(location[-1]), _known_keys(model, location[:-1]), n=1)
        hint = f", did you mean `{nearest[0]}`?" if nearest else ""
        return f"{where}unknown key `{key}`{hint}"
    if problem["type"] == "missing":
        return f"{where}key `{key}` is missing"
    received = problem["input"]
    shown = f" (received {received!r})" if isinstance(received, str | int | float | bool) else ""
    return f"{where}`{key}`: {problem['msg']}{shown}"


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


def _known_keys(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Return the keys allowed at `location`, following nested models, lists and optional types."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part) if _is_model(current) else None
        if field is None:
            return []
        current = _inner_model(field.annotation)
    return list(current.model_fields) if _is_model(current) else []


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def _inner_model(annotation: Any) -> Any:
    """Return the pydantic model inside `X | None`, `list[X]`, `dict[str, X]`, …"""
    if _is_model(annotation):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        inner = _inner_model(argument)
        if inner is not None:
            return inner
    return None
