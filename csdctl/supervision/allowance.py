"""How much a rank may send; pure."""


class Allowance:
    """An amount that grows with time, up to `burst`, and that is spent."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left = burst
        self._updated: float | None = None

    def spend(self, amount: float, now: float) -> float:
        """Spend `amount` at the time `now`, in monotonic seconds; return the seconds until it is available.

        0.0: it was available at once.
        """
        elapsed_s = now - self._updated if self._updated is not None else 0.0
        self._updated = now
        self._left = min(self._burst, self._left + elapsed_s * self._per_s) - amount
        return max(0.0, -self._left / self._per_s)
