"""`--limit` and `--exclude`: select the nodes of a command."""

import fnmatch
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.fleet.ranges import expand_range

_WILDCARDS = re.compile(r"[*?\[]")


def select_nodes(
    fleet: Fleet, limit: Sequence[str] = (), exclude: Sequence[str] = (), *, may_be_empty: bool = False
) -> Fleet:
    """Return the fleet with the nodes that match `limit` (all when empty) and not `exclude`.

    A pattern is a name with wildcards or a range (`csd[0-7]`), or a group; several may be joined by
    commas. Raises InputError for a pattern without a match, or when no node remains; `may_be_empty`: the host
    alone is enough.
    """
    groups = {node.name: node.groups for node in fleet.nodes}
    kept = set(select_names(groups, limit, exclude, where=str(fleet.path), may_be_empty=may_be_empty))
    return replace(fleet, nodes=tuple(node for node in fleet.nodes if node.name in kept))


def select_names(
    groups: Mapping[str, Sequence[str]],
    limit: Sequence[str],
    exclude: Sequence[str],
    *,
    where: str,
    may_be_empty: bool = False,
) -> list[str]:
    """Select names as `select_nodes` does, given the groups of each name; `where` names their file."""
    kept: Iterable[str] = groups
    if limit:
        wanted = {name for pattern in _split(limit) for name in _matching(groups, pattern, "--limit", where)}
        kept = [name for name in kept if name in wanted]
    unwanted = {
        name for pattern in _split(exclude) for name in _matching(groups, pattern, "--exclude", where)
    }
    kept = [name for name in kept if name not in unwanted]
    if not kept and not may_be_empty:
        raise InputError(f"--limit and --exclude leave no node of {where}", remedy="select at least one node")
    return kept


def keep_nodes(fleet: Fleet, names: Container[str]) -> Fleet:
    """Return the fleet with only the nodes in `names`; possibly without nodes."""
    return replace(fleet, nodes=tuple(node for node in fleet.nodes if node.name in names))


def _split(patterns: Sequence[str]) -> list[str]:
    return [pattern.strip() for joined in patterns for pattern in joined.split(",") if pattern.strip()]


def _matching(groups: Mapping[str, Sequence[str]], pattern: str, option: str, where: str) -> list[str]:
    expanded = expand_range(pattern)
    wanted = {name for name in expanded if not _WILDCARDS.search(name)}
    patterns = [re.compile(fnmatch.translate(name)) for name in expanded if name not in wanted]
    found = [
        name
        for name, own in groups.items()
        if name in wanted or pattern in own or any(each.match(name) for each in patterns)
    ]
    if not found:
        known = [*list(groups)[:8], *["…"] * (len(groups) > 8)]
        raise InputError(
            f"{option} {pattern!r} matches no node of {where}", remedy=f"nodes: {', '.join(known)}"
        )
    return found
