"""`--limit` and `--exclude`: which nodes of a fleet a command works on."""

import fnmatch
import math
import re
from collections.abc import Container, Sequence
from dataclasses import replace

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, Node

_RANGE = re.compile(r"\[(\d+)-(\d+)\]")
MAX_RANGE = 100_000


def select_nodes(fleet: Fleet, limit: Sequence[str] = (), exclude: Sequence[str] = ()) -> Fleet:
    """The fleet with only the nodes that match `limit` (all when empty) and not `exclude`.

    A pattern is a name with wildcards or a range (`csd[0-7]`), or a group; several may be joined by
    commas. Raises InputError for a pattern that matches nothing, and
    when no node is left.
    """
    kept = fleet.nodes
    if limit:
        wanted = {node.name for pattern in _split(limit) for node in _matching(fleet, pattern, "--limit")}
        kept = tuple(node for node in kept if node.name in wanted)
    unwanted = {node.name for pattern in _split(exclude) for node in _matching(fleet, pattern, "--exclude")}
    kept = tuple(node for node in kept if node.name not in unwanted)
    if not kept:
        raise InputError(f"--limit and --exclude leave no node of {fleet.path}", remedy="leave one at least")
    return replace(fleet, nodes=kept)


def keep_nodes(fleet: Fleet, names: Container[str]) -> Fleet:
    """The fleet with only the nodes called one of `names`; may be left with none."""
    return replace(fleet, nodes=tuple(node for node in fleet.nodes if node.name in names))


def _split(patterns: Sequence[str]) -> list[str]:
    return [pattern.strip() for joined in patterns for pattern in joined.split(",") if pattern.strip()]


def _matching(fleet: Fleet, pattern: str, option: str) -> list[Node]:
    names = _expand(pattern)
    found = [
        node
        for node in fleet.nodes
        if node.group == pattern or any(fnmatch.fnmatchcase(node.name, name) for name in names)
    ]
    if not found:
        known = [node.name for node in fleet.nodes[:8]] + ["…"] * (len(fleet.nodes) > 8)
        raise InputError(
            f"{option} {pattern!r} matches no node of {fleet.path}", remedy=f"nodes: {', '.join(known)}"
        )
    return found


def _expand(pattern: str) -> list[str]:
    """`csd[0-2]` as csd0, csd1, csd2; leading zeros keep their width. Raises InputError for too many."""
    sizes = [int(last) - int(first) + 1 for first, last in _RANGE.findall(pattern)]
    if math.prod(max(1, size) for size in sizes) > MAX_RANGE:
        raise InputError(
            f"{pattern!r} stands for more than {MAX_RANGE:,} names", remedy="use a wildcard: csd*"
        )
    found = _RANGE.search(pattern)
    if not found:
        return [pattern]
    first, last = int(found[1]), int(found[2])
    if last < first or last - first > MAX_RANGE:
        raise InputError(f"range {found[0]} in {pattern!r} is not usable", remedy="write it as [first-last]")
    width = len(found[1]) if found[1].startswith("0") else 0
    middle = [f"{number:0{width}d}" for number in range(first, last + 1)]
    return [
        name for part in middle for name in _expand(pattern[: found.start()] + part + pattern[found.end() :])
    ]
