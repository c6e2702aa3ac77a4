"""Names of nodes: which are allowed in ssh_config and command lines, and ranges of them. Pure.

`csd[0-35]` stands for 36 names, and names are shown as such ranges. Numbers with leading zeros keep their
width: `dpu[08-10]` is dpu08, dpu09, dpu10.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from csdctl.errors import InputError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# An IPv6 address has two colons. One that is link-local is of an interface, without which nobody can connect.
ADDRESS = re.compile(r"(?![^:]*:\d*$)(?![Ff][Ee][89ABab].:[^%]*%?$)[A-Za-z0-9:][A-Za-z0-9.:%_-]{0,253}")
AN_ADDRESS = "address or host name (a port is `port:`; a link-local one needs its interface: fe80::1%eth0)"
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")
GROUP = re.compile(r"[^\s,\[\]\x00-\x1f-][^\s,\[\]\x00-\x1f]{0,99}")


ValueT = TypeVar("ValueT", bound=Hashable)

MAX_RANGE = 100_000

MAX_PATTERN = 300

_RANGE = re.compile(r"\[([0-9]+)-([0-9]+)\]")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]*)([^0-9]*)", re.DOTALL)


def count_range(pattern: str) -> int:
    """Return how many names `expand_range` returns. Raises InputError for an invalid or large range."""
    if len(pattern) > MAX_PATTERN:
        raise InputError(f"a name of {len(pattern):,} characters, expected at most {MAX_PATTERN}")
    count = 1
    for match in _RANGE.finditer(pattern):
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise InputError(f"range {match[0]} in {pattern!r} is invalid", remedy="write it as [first-last]")
        count *= last - first + 1
        if count > MAX_RANGE:
            raise InputError(
                f"{pattern!r} expands to more than {MAX_RANGE:,} names", remedy="use a wildcard: csd*"
            )
    return count


def expand_range(pattern: str) -> list[str]:
    """Expand `csd[0-2]` to csd0, csd1, csd2. Several ranges multiply. Raises what `count_range` raises."""
    count_range(pattern)
    head, *parts = _RANGE.split(pattern)
    names = [head]
    for first, last, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        numbers = [_padded(number, first) for number in range(int(first), int(last) + 1)]
        names = [f"{name}{number}{text}" for name in names for number in numbers]
    return names


def range_ends(pattern: str) -> tuple[str, str]:
    """Return the first and the last name of `expand_range`: no other name is longer, or has other letters."""
    count_range(pattern)
    return (
        _RANGE.sub(lambda match: match[1], pattern),
        _RANGE.sub(lambda match: _padded(int(match[2]), match[1]), pattern),
    )


def _padded(number: int, first: str) -> str:
    return f"{number:0{len(first) if first.startswith('0') else 0}d}"


def names_by_value(values: Iterable[tuple[str, ValueT]]) -> dict[ValueT, list[str]]:
    """Return the names that have each value, in their order."""
    names: dict[ValueT, list[str]] = {}
    for name, value in values:
        names.setdefault(value, []).append(name)
    return names


def fold_names(names: Iterable[str]) -> list[str]:
    """Fold `names` to ranges, in order of their first names: csd0, csd1, jetson become csd[0-1], jetson."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        groups[_split(name)[:2]].append(name)
    ordered = [sorted(group, key=lambda name: int(_split(name)[2] or -1)) for group in groups.values()]
    return [folded for group in ordered for (folded,) in fold_rows([(name,) for name in group])]


def format_node_names(names: Iterable[str], *, at_most: int = 8) -> str:
    """Return `names` for one line of a message: up to three as they are, more as at most `at_most` ranges."""
    unique = list(dict.fromkeys(names))
    ranges = unique if len(unique) <= min(3, at_most) else fold_names(unique)
    num_hidden = len(ranges) - at_most
    return ", ".join([*ranges[:at_most], *([f"and {num_hidden} more"] if num_hidden > 0 else [])])


def fold_rows(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield `rows`. Consecutive rows whose columns all count up together become one row of ranges.

    (csd0, 10.1.1.2) and (csd1, 10.1.1.3) become (csd[0-1], 10.1.1.[2-3]).
    """
    start = 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and rows[end] == tuple(_add(name, end - start) for name in rows[start]):
            end += 1
        if end == start + 1:
            yield rows[start]
        else:
            ends = zip(map(_split, rows[start]), map(_split, rows[end - 1]), strict=True)
            yield tuple(f"{head}[{first}-{last}]{tail}" for (head, tail, first), (_, _, last) in ends)
        start = end


def _add(name: str, distance: int) -> str | None:
    """Return `name` with its last number increased. None without a number."""
    head, tail, digits = _split(name)
    return f"{head}{_padded(int(digits) + distance, digits)}{tail}" if digits else None


def _split(name: str) -> tuple[str, str, str]:
    match = _LAST_NUMBER.fullmatch(name)
    assert match  # it matches every text
    return match[1], match[3], match[2]
