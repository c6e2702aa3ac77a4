"""The ranges of numbers and texts that other machines send, as annotations: `Annotated[int, Between(0, 9)]`.

`json_codec` checks them wherever a dataclass is read.
"""

from dataclasses import dataclass
from typing import Annotated, Any

MAX_RANKS = 1 << 16


@dataclass(frozen=True)
class Between:
    """A number from `minimum` to `maximum`, both included."""

    minimum: float
    maximum: float

    def allows(self, value: Any) -> bool:
        """Return whether the number `value` is in the range."""
        return bool(self.minimum <= value <= self.maximum)

    def __str__(self) -> str:
        return f"{self.minimum:,} to {self.maximum:,}"


@dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    values: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        """Return whether `value` is one of them."""
        return value in self.values

    def __str__(self) -> str:
        return "one of " + ", ".join(map(repr, self.values))


@dataclass(frozen=True)
class MaxLength:
    """A text or tuple of at most this length."""

    length: int

    def allows(self, value: Any) -> bool:
        """Return whether `value` is not longer."""
        return len(value) <= self.length

    def __str__(self) -> str:
        return f"a length of at most {self.length}"


class AnyNumber:
    """NaN and the infinities are numbers too; without this annotation, a float is finite."""


Count = Annotated[int, Between(0, 1 << 53)]
"""A number of things; exact as a float too."""
NumSteps = Annotated[int, Between(1, 1 << 53)]
BatchSize = Annotated[int, Between(1, 1 << 31)]
RankNumber = Annotated[int, Between(0, MAX_RANKS - 1)]
Generation = Annotated[int, Between(0, 1 << 31)]
"""Of a group of ranks, from 1; 0 where there is no group."""
Epoch = Annotated[int, Between(0, 1 << 31)]
"""From 1; 0 before the first."""
ExitCode = Annotated[int, Between(0, 255)]
Seconds = Annotated[float, Between(0.0, 1e9)]
Measured = Annotated[float, AnyNumber]
"""Computed from data or from other ranks' numbers: NaN when a training diverges."""
Celsius = Annotated[float, Between(-100.0, 1000.0)]
ShortText = Annotated[str, MaxLength(256)]
"""A name, a hash, a reason."""
Shape = Annotated[tuple[Annotated[int, Between(0, 1 << 31)], ...], MaxLength(32)]
"""Of an array; 0 for any size."""
