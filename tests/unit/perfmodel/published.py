"""What the STANNIS paper prints about Newport CSDs: its figures, and what they imply.

HeydariGorji et al., *STANNIS: Low-Power Acceleration of Deep Neural Network Training Using Computational
Storage Devices*. Which figures are consistent, and which are not: docs/explanation/the-papers-figures.md.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from csdctl.perfmodel.prediction import CollectiveCost, RankModel, StepTime
from csdctl.perfmodel.spread import Spread
from csdctl.tuning.scaling_curve import Power, ScalableFleet
from csdctl.tuning.search import Limits
from csdctl.workflows.forecast.forecast import ForecastBasis

BYTES_PER_PARAMETER = 4
"""That every rank gives to a sum: a float32."""


@dataclass(frozen=True)
class RingCost(CollectiveCost):
    """Horovod's ring (section II.B), with seconds per byte on one of its links.

    Each rank sends 2 (p − 1) / p of the vector to its neighbour, all at the same time. The cost of one more
    rank decreases with their number: the paper saw no further slow-down beyond 5 to 6 devices.
    """

    def at(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds to sum vectors of `num_bytes` over `num_ranks`; 0 for one rank."""
        return 2 * (num_ranks - 1) / max(1, num_ranks) * num_bytes * self.per_byte_s


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
        return RankModel("host", step_time, is_required=True, batch_size=self.host_batch_size)

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

# What the paper implies but does not print. test_published.py computes both.
NEWPORT_RING = RingCost(per_byte_s=2.886979e-08)
"""With this ring, 24 Newports reach LARGEST_SPEEDUP."""
NEWPORT_POWER_W = (316.7108, 0.8699841, 406.755)
"""Watts of the server, of each Newport that trains, and of the host alone, with 24 ordinary SSDs of 11 TB
(section V.B: another machine). Fitted to the energies of Table II."""


def basis_of(network: Network, num_nodes: int = NUM_NEWPORTS) -> ForecastBasis:
    """Return a basis of the paper's figures, with `num_nodes` Newports that keep their batch sizes.

    Other numbers of nodes get the best batch sizes whose sum is no larger.
    """
    row = TABLE_1[network]
    host_w, node_w, _ = NEWPORT_POWER_W
    global_batch = row.host_batch_size + num_nodes * row.node_batch_size
    return ForecastBasis(
        title=row.title,
        source="measured",
        fleet=ScalableFleet(
            row.host,
            tuple(replace(row.node, node=f"csd{number}") for number in range(num_nodes)),
            sum_cost=NEWPORT_RING,
            vector_bytes=BYTES_PER_PARAMETER * row.num_parameters,
            limits=lambda count: Limits(global_batch),
            is_planned=True,
        ),
        origins={"speeds": "Table I"},
        spread=Spread(0.0025, 10),
        power=Power(host_w, node_w),
        num_samples=NUM_PUBLIC + NUM_PRIVATE,
    )
