"""Ranges of names: `csd[0-35]` to the names it stands for, and names back to ranges; pure.

Numbers with leading zeros keep their width: `dpu[08-10]` is dpu08, dpu09, dpu10.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from csdctl.errors import InputError

MAX_RANGE = 100_000

_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def is_range(text: str) -> bool:
    """Whether `text` has a range in it."""
    return _RANGE.search(text) is not None


def expand_range(pattern: str) -> list[str]:
    """`csd[0-2]` as csd0, csd1, csd2; several ranges multiply. Raises InputError for too many."""
    sizes = [int(last) - int(first) + 1 for first, last in _RANGE.findall(pattern)]
    if math.prod(max(1, size) for size in sizes) > MAX_RANGE:
        raise InputError(
            f"{pattern!r} stands for more than {MAX_RANGE:,} names", remedy="use a wildcard: csd*"
        )
    found = _RANGE.search(pattern)
    if not found:
        return [pattern]
    first, last = int(found[1]), int(found[2])
    if last < first:
        raise InputError(f"range {found[0]} in {pattern!r} is not usable", remedy="write it as [first-last]")
    width = len(found[1]) if found[1].startswith("0") else 0
    rests = expand_range(pattern[found.end() :])
    head = pattern[: found.start()]
    return [f"{head}{number:0{width}d}{rest}" for number in range(first, last + 1) for rest in rests]


_NO_NUMBER = -2
"""Of a name without digits; not next to 0, or the two would be a range."""


def fold_names(names: Iterable[str]) -> list[str]:
    """`names` as few ranges, in the order of their first names: csd0, csd1, csd2, jetson → csd[0-2], jetson.

    `expand_range` of the result gives the same names, each once.
    """
    numbers: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    unique = dict.fromkeys(names)
    padded = {(*_split(name)[:2], len(_split(name)[2])) for name in unique if _is_padded(_split(name)[2])}
    for name in unique:
        head, tail, digits = _split(name)
        width = len(digits) if (head, tail, len(digits)) in padded else 0
        numbers[head, tail, width].append(int(digits) if digits else _NO_NUMBER)
    return [
        _show(head, tail, width, first, last)
        for (head, tail, width), found in numbers.items()
        for first, last in _runs(sorted(found))
    ]


def show_names(names: Iterable[str], *, at_most: int = 8) -> str:
    """`names` folded, for one line of a message; no more than `at_most` pieces."""
    pieces = fold_names(names)
    left = len(pieces) - at_most
    return ", ".join([*pieces[:at_most], *([f"and {left} more"] if left > 0 else [])])


def fold_ordered(columns: Sequence[tuple[str, ...]]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Runs of rows that one row of ranges can stand for, as (begin, end, folded row).

    Every column of a run counts up with its neighbours, or none is folded: (csd0, 10.1.1.2) and
    (csd1, 10.1.1.3) become (csd[0-1], 10.1.1.[2-3]).
    """
    begin = 0
    while begin < len(columns):
        end = begin + 1
        while end < len(columns) and _folds(columns[begin], columns[end], end - begin):
            end += 1
        yield begin, end, tuple(map(_fold_ends, columns[begin], columns[end - 1]))
        begin = end


def _folds(first: tuple[str, ...], other: tuple[str, ...], distance: int) -> bool:
    """Whether `other` stands where the row `distance` rows after `first` should, in every column."""
    return all(_counted_on(one, distance) == two for one, two in zip(first, other, strict=True))


def _counted_on(name: str, distance: int) -> str | None:
    head, tail, digits = _split(name)
    if not digits:
        return None
    width = len(digits) if digits.startswith("0") else 0
    return f"{head}{int(digits) + distance:0{width}d}{tail}"


def _fold_ends(first: str, last: str) -> str:
    if first == last:
        return first
    head, tail, digits = _split(first)
    return f"{head}[{digits}-{_split(last)[2]}]{tail}"


def _split(name: str) -> tuple[str, str, str]:
    """What stands before and after the last number of `name`, and that number's digits."""
    end = len(name)
    while end and not ("0" <= name[end - 1] <= "9"):
        end -= 1
    begin = end
    while begin and "0" <= name[begin - 1] <= "9":
        begin -= 1
    return name[:begin], name[end:], name[begin:end]


def _is_padded(digits: str) -> bool:
    return len(digits) > 1 and digits.startswith("0")


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[begin], numbers[index - 1]
            begin = index


def _show(head: str, tail: str, width: int, first: int, last: int) -> str:
    if first < 0:
        return head + tail
    if first == last:
        return f"{head}{first:0{width}d}{tail}"
    return f"{head}[{first:0{width}d}-{last:0{width}d}]{tail}"
