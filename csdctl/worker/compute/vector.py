"""The layout of the vector that the ranks sum in every step.

    [ Σ gradient | changes of layers' state · n | Σ loss, metrics' states, (loss count), n | stop | seconds ]

Where layers add a loss for each sample, which fit sums over the batch, its gradient and its sum stand behind
those of the rest, and are not divided.

All parts are float32. The step (step.py) owns everything up to n, the number of samples; divided by it, a sum
over ranks is the mean over all their samples. A loss that is no mean over samples has a count of its own:
unmasked elements, a sum of weights, or the public samples among private ones with noise. Behind n the
training loop adds whether a stop was requested, and one element for each rank of the run with the seconds
that this rank computed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class VectorLayout:
    """Where the parts of a summed vector are."""

    num_gradients: int
    num_statistics: int
    num_states: int
    """Of the metrics."""
    has_loss_count: bool = False
    """Whether the loss is divided by a count of its own, which stands before n."""
    divides_gradients: bool = False
    """Whether gradients are divided by that count too; otherwise by n."""
    has_summed: bool = False
    """Whether a part of the loss is a sum over samples, not a mean, with a gradient of its own."""
    num_ranks: int = 0
    """Ranks whose compute times follow; 0: the step's part alone."""

    @property
    def num_sums(self) -> int:
        """Elements of the step's part behind gradients and statistics: loss, metrics' states and counts."""
        return 2 + self.has_summed + self.num_states + self.has_loss_count

    @property
    def step_size(self) -> int:
        """Elements of the step's part."""
        return self.num_gradients * (1 + self.has_summed) + self.num_statistics + self.num_sums

    @property
    def size(self) -> int:
        """All elements."""
        return self.step_size + (1 + self.num_ranks if self.num_ranks else 0)

    @property
    def gradients(self) -> slice:
        """The summed gradients of all trainable variables, flat, in the model's order."""
        return slice(0, self.num_gradients * (1 + self.has_summed))

    @property
    def divided_gradients(self) -> slice:
        """Those of the loss that is a mean."""
        return slice(0, self.num_gradients)

    @property
    def undivided_gradients(self) -> slice:
        """Those of the loss that is a sum."""
        return slice(self.num_gradients, self.gradients.stop)

    @property
    def statistics(self) -> slice:
        """The changes of the state that layers keep, times n."""
        return slice(self.gradients.stop, self.gradients.stop + self.num_statistics)

    @property
    def sums(self) -> slice:
        """Loss, metrics' states, and the count that the loss is divided by."""
        return slice(self.statistics.stop, self.step_size - self.has_loss_count)

    @property
    def divisor(self) -> int:
        """The index of the count that gradients are divided by."""
        return self.count - self.divides_gradients

    @property
    def count(self) -> int:
        """The index of n."""
        return self.step_size - 1

    @property
    def step(self) -> slice:
        """The step's part."""
        return slice(0, self.step_size)

    @property
    def stop(self) -> int:
        """The index of the stop request: above 0 when a stop was requested."""
        return self.step_size

    @property
    def compute_s(self) -> slice:
        """Each rank's compute seconds, by rank of the run."""
        return slice(self.step_size + 1, self.step_size + 1 + self.num_ranks)
