"""The request to try `data.augment` on a few public samples of the host."""

from dataclasses import dataclass

from csdctl.worker.protocol.bounds import Count
from csdctl.worker.protocol.run_spec import UserCode


@dataclass(frozen=True)
class AugmentTrial:
    """What to try, in the same way as a rank runs it."""

    reference: str
    """`FILE.py:NAME`"""
    code: UserCode
    directory: str
    """Of the prepared public data."""
    seed: int


@dataclass(frozen=True)
class AugmentTried:
    """The function did what it must on this number of samples."""

    num_samples: Count
