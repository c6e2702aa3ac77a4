"""Read documents as pydantic models: every problem with its line and, for an unknown key, the nearest one."""

import difflib
import functools
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from csdctl.documents.files import AGAIN, load_text
from csdctl.documents.yaml_text import build, compose
from csdctl.errors import InputError

MAX_PROBLEMS = 20
"""Number of problems that are reported of one document."""
MAX_SHOWN = 60
"""Characters of a key or a value in a message."""


class Document(BaseModel):
    """Base of every file written by the user: unknown keys are errors, numbers finite, values immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


DocumentT = TypeVar("DocumentT", bound=BaseModel)
ValueT = TypeVar("ValueT")


def load_document(path: Path, model: type[DocumentT]) -> DocumentT:
    """Read the YAML file `path` as `model`; raises InputError with file, line and remedy."""
    return parse_document(
        load_text(path, remedy=f"create {path} or give another file"), model, name=str(path)
    )


def parse_document(text: str, model: type[DocumentT], *, name: str) -> DocumentT:
    """Parse YAML `text` as `model`; `name` identifies it in error messages."""
    tree = compose(text, name)
    content = build(tree, name)
    if not isinstance(content, dict):
        raise InputError(
            f"{name}: expected keys such as {', '.join(list(model.model_fields)[:3])}, "
            f"found {'nothing' if content is None else type(content).__name__}"
        )
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [f"{name}{_describe(problem, tree, model)}" for problem in error.errors()[:MAX_PROBLEMS]]
        if error.error_count() > MAX_PROBLEMS:
            problems.append(f"{name}: and {error.error_count() - MAX_PROBLEMS:,} more problems")
    raise InputError("\n".join(problems), remedy=f"fix {name}")


def check_values(content: object, expected: type[ValueT], name: str, *, remedy: str = AGAIN) -> ValueT:
    """Return parsed JSON as `expected`, a dataclass or model; raises InputError naming the first wrong value.

    `name` identifies the content in messages.
    """
    try:
        checked: ValueT = _adapter(cast(Hashable, expected)).validate_python(content)
        return checked
    except ValidationError as error:
        problem = error.errors()[0]
        raise InputError(f"{name}{_describe(problem, None, None)}", remedy=remedy) from None


@functools.cache
def _adapter(expected: Any) -> TypeAdapter[Any]:
    return TypeAdapter(expected)


def _describe(problem: Any, tree: yaml.Node | None, model: type[BaseModel] | None) -> str:
    location: tuple[str | int, ...] = problem["loc"]
    line = _line_of(tree, location)
    key = _shorten(".".join(str(part) for part in location))
    where = f":{line}: " if line else ": "
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a dataclass
        known = _known_keys(model) if model else ()
        nearest = difflib.get_close_matches(str(location[-1])[:MAX_SHOWN], known, n=1)
        hint = f", did you mean `{nearest[0]}`?" if nearest else ""
        return f"{where}unknown key `{key}`{hint}"
    if problem["type"] == "missing":
        return f"{where}key `{key}` is missing"
    received = problem["input"]
    shown = f" (received {_shorten(repr(received))})" if isinstance(received, str | int | float) else ""
    what = f"`{key}`: " if key else ""
    message = problem["msg"].removeprefix("Value error, ")  # pydantic's, before what a validator raised
    return f"{where}{what}{_shorten(message, 5 * MAX_SHOWN)}{shown}"


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


def _known_keys(model: type[BaseModel]) -> set[str]:
    """Return the keys of a document, at all its levels."""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return {name for part in parts for name in part.get("properties", {})}
