"""What can be seen of a fleet while it is measured."""

from collections.abc import Mapping
from typing import Protocol

from csdctl.worker.protocol.events import Event
from csdctl.worker.protocol.probe import ProbeResult

LOADING, IDLE, SUMMING, MEASURING, MEASURED, TOO_LARGE = (
    "loading",
    "idle",
    "timing sums",
    "measuring",
    "measured",
    "out of memory",
)
"""What a machine does, or has found."""


class TuneWatch(Protocol):
    """Is told what the machines do; may be called from any thread."""

    def on_machine(self, name: str, doing: str, batch_size: int = ..., samples_per_s: float = ..., /) -> None:
        """Machine `name` does this now: one of the words above."""

    def on_probes(self, results: Mapping[str, ProbeResult | None], /) -> None:
        """A round of probes is over: results by machine."""

    def on_trial(self, num_steps: int, batch_sizes: Mapping[str, int], /) -> None:
        """All machines in `batch_sizes` take `num_steps` steps together."""

    def on_event(self, event: Event, /) -> None:
        """A rank of the trial has reported this."""
