"""What the STANNIS paper prints about Newport CSDs: Table I, Table II and the figures in its text; pure data.

HeydariGorji et al., *STANNIS: Low-Power Acceleration of Deep Neural Network Training Using Computational
Storage Devices*. Which figures are consistent, and which are not: docs/explanation/the-papers-figures.md.
"""

from dataclasses import dataclass
from enum import StrEnum

from csdctl.perfmodel.prediction import RankModel
from csdctl.perfmodel.scaling import PlannedRank
from csdctl.perfmodel.step_time import StepTime

SOURCE = "STANNIS paper (HeydariGorji et al.)"
BYTES_PER_PARAMETER = 4


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
    num_flop: int
    num_macs: int
    host_batch_size: int
    node_batch_size: int
    host_samples_per_s: float
    node_samples_per_s: float

    @property
    def gradient_bytes(self) -> int:
        """Bytes every rank gives to a sum: one float32 for each parameter."""
        return self.num_parameters * BYTES_PER_PARAMETER

    @property
    def host(self) -> PlannedRank:
        """The Xeon Silver 4108 at its batch size; the same speed at any other."""
        return _rank("host", self.host_batch_size, self.host_samples_per_s)

    @property
    def node(self) -> PlannedRank:
        """A Newport at its batch size; the same speed at any other."""
        return _rank("newport", self.node_batch_size, self.node_samples_per_s)


TABLE_1 = {
    Network.MOBILENETV2: PublishedNetwork(
        "MobileNetV2", 3_470_000, 7_160_000, 56_000_000, 315, 25, 31.05, 3.08
    ),
    Network.NASNET: PublishedNetwork("NASNet", 5_300_000, 10_740_000, 564_000_000, 325, 15, 47.31, 2.80),
    Network.INCEPTIONV3: PublishedNetwork(
        "InceptionV3", 23_830_000, 47_820_000, 5_720_000_000, 370, 16, 30.80, 1.85
    ),
    Network.SQUEEZENET: PublishedNetwork(
        "SqueezeNet", 1_250_000, 2_460_000, 861_000_000, 850, 50, 219.0, 16.3
    ),
}


@dataclass(frozen=True)
class PublishedEnergy:
    """A column of Table II: MobileNetV2, with the power of the whole server metered at its input."""

    num_nodes: int
    joules_per_image: float
    saving: float
    """Against no CSD, 0…1."""
    flops_per_watt: float


TABLE_2 = (
    PublishedEnergy(0, 13.10, 0.00, 5.87e6),
    PublishedEnergy(4, 8.30, 0.37, 7.05e6),
    PublishedEnergy(8, 6.84, 0.48, 8.18e6),
    PublishedEnergy(16, 5.05, 0.62, 10.37e6),
    PublishedEnergy(24, 4.02, 0.69, 12.26e6),
)
"""Section V.B: without CSDs, the server has 24 ordinary SSDs of 11 TB; it is a different machine."""

NUM_NEWPORTS = 24
LARGEST_SPEEDUP = 2.7
"""Abstract and section VI: "up to 2.7x". That is MobileNetV2: the other batch sizes do not allow it."""
NUM_PUBLIC = 72_000
NUM_PRIVATE = 12_000
"""Section V: private images, "distributed over all Newport CSDs"."""
MARGIN_SCALE = 5.0
"""Algorithm 1's E for the "fixed 20% margin" of section IV."""


def _rank(name: str, batch_size: int, samples_per_s: float) -> PlannedRank:
    return PlannedRank(RankModel(name, StepTime(0.0, 1 / samples_per_s)), batch_size)
