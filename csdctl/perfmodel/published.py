"""What the STANNIS paper prints about Newport CSDs: its figures, and what they imply; pure.

HeydariGorji et al., *STANNIS: Low-Power Acceleration of Deep Neural Network Training Using Computational
Storage Devices*. Which figures are consistent, and which are not: docs/explanation/the-papers-figures.md.
"""

from dataclasses import dataclass
from enum import StrEnum

from csdctl.perfmodel.prediction import RankModel, RingCost, StepTime

SOURCE = "STANNIS paper (HeydariGorji et al.)"
BYTES_PER_PARAMETER = 4
"""That every rank gives to a sum: a float32."""


class Network(StrEnum):
    """The networks of Table I."""

    MOBILENETV2 = "mobilenetv2"
    NASNET = "nasnet"
    INCEPTIONV3 = "inceptionv3"
    SQUEEZENET = "squeezenet"


@dataclass(frozen=True)
class PublishedNetwork:
    """A row of Table I: one network, on the host alone and on one Newport alone."""

    title: str
    num_parameters: int
    host_batch_size: int
    node_batch_size: int
    host_samples_per_s: float
    node_samples_per_s: float

    @property
    def host(self) -> RankModel:
        """The Xeon Silver 4108 at its batch size; the same speed at any other."""
        step_time = StepTime(0.0, 1 / self.host_samples_per_s)
        return RankModel("host", step_time, batch_size=self.host_batch_size)

    @property
    def node(self) -> RankModel:
        """A Newport at its batch size; the same speed at any other."""
        step_time = StepTime(0.0, 1 / self.node_samples_per_s)
        return RankModel("newport", step_time, batch_size=self.node_batch_size)


TABLE_1 = {
    Network.MOBILENETV2: PublishedNetwork("MobileNetV2", 3_470_000, 315, 25, 31.05, 3.08),
    Network.NASNET: PublishedNetwork("NASNet", 5_300_000, 325, 15, 47.31, 2.80),
    Network.INCEPTIONV3: PublishedNetwork("InceptionV3", 23_830_000, 370, 16, 30.80, 1.85),
    Network.SQUEEZENET: PublishedNetwork("SqueezeNet", 1_250_000, 850, 50, 219.0, 16.3),
}
NUM_NEWPORTS = 24
LARGEST_SPEEDUP = 2.7
"""Abstract and section VI: "up to 2.7x". That is MobileNetV2: the other batch sizes do not allow it."""
NUM_PUBLIC = 72_000
NUM_PRIVATE = 12_000
"""Section V: private images, "distributed over all Newport CSDs"."""

# What the paper implies but does not print. tests/unit/perfmodel/test_published.py computes both.
NEWPORT_RING = RingCost(2.886979e-08)
"""With this ring, 24 Newports reach LARGEST_SPEEDUP."""
NEWPORT_POWER_W = (316.7108, 0.8699841, 406.755)
"""Watts of the server, of each Newport that trains, and of the host alone, with 24 ordinary SSDs of 11 TB
(section V.B: another machine). Fitted to the energies of Table II."""
