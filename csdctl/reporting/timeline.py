"""Quantities of each rank over time, in a fixed number of intervals however long the run is; pure."""

import math
from collections.abc import Sequence

MAX_INTERVALS = 128
"""A run with more has its intervals merged in pairs, and then half as many of twice the length."""
FIRST_INTERVAL_S = 1.0


class Timeline:
    """Adds up quantities over time; memory does not depend on the length of the run.

    `amounts[series][quantity][interval]` is the sum of what fell into that interval.
    """

    def __init__(self, num_series: int, num_quantities: int, start_s: float) -> None:
        """`start_s`: the Unix time at which the first interval begins; what came before counts in it."""
        self.start_s, self.interval_s = start_s, FIRST_INTERVAL_S
        self.num_intervals = 0
        """Intervals up to the last that has something."""
        self.amounts = [[[0.0] * MAX_INTERVALS for _ in range(num_quantities)] for _ in range(num_series)]

    def add(self, series: int, begin_s: float, end_s: float, amounts: Sequence[float]) -> None:
        """Spread `amounts`, one per quantity, evenly over the time from `begin_s` to `end_s`, Unix times."""
        end = max(end_s - self.start_s, 0.0)
        begin = min(max(begin_s - self.start_s, 0.0), end)
        while end >= MAX_INTERVALS * self.interval_s:
            self._merge()
        first, last = int(begin / self.interval_s), int(end / self.interval_s)
        self.num_intervals = max(self.num_intervals, last + 1)
        rows = self.amounts[series]
        if first == last:
            for row, amount in zip(rows, amounts, strict=True):
                row[first] += amount
            return
        for interval in range(first, last + 1):
            covered = min(end, (interval + 1) * self.interval_s) - max(begin, interval * self.interval_s)
            share = covered / (end - begin)
            for row, amount in zip(rows, amounts, strict=True):
                row[interval] += amount * share

    def interval_of(self, time_s: float) -> tuple[float, float]:
        """Return where the interval of `time_s` begins and ends, in Unix time; all before is in the first."""
        number = max(int((time_s - self.start_s) / self.interval_s), 0)
        begin_s = self.start_s + number * self.interval_s
        return begin_s if number else -math.inf, begin_s + self.interval_s

    def _merge(self) -> None:
        """Merge the intervals in pairs."""
        empty = [0.0] * (MAX_INTERVALS // 2)
        for rows in self.amounts:
            for number, row in enumerate(rows):
                rows[number] = [a + b for a, b in zip(row[::2], row[1::2], strict=True)] + empty
        self.interval_s *= 2
        self.num_intervals = (self.num_intervals + 1) // 2
