"""What the paper does not print and its figures imply: the sum over the ranks, and one pair of powers; pure.

Two numbers are fitted in all. The seconds a byte of Horovod's ring come from the one speed-up that the
text gives (2.7 with 24 CSDs); the pair of powers from the energy row of Table II. Batch sizes and speeds
are Table I's. How far this reaches: docs/explanation/the-papers-figures.md.
"""

from collections.abc import Sequence

from csdctl.perfmodel.energy import Power, fit_power
from csdctl.perfmodel.published import (
    LARGEST_SPEEDUP,
    NUM_NEWPORTS,
    TABLE_1,
    TABLE_2,
    Network,
    PublishedEnergy,
    PublishedNetwork,
)
from csdctl.perfmodel.ring import RingCost, ring_share
from csdctl.perfmodel.scaling import CurvePoint, predict_curve


def fit_ring(
    network: PublishedNetwork = TABLE_1[Network.MOBILENETV2],
    speedup: float = LARGEST_SPEEDUP,
    num_nodes: int = NUM_NEWPORTS,
) -> RingCost:
    """The ring with which `num_nodes` Newports bring `speedup` over the host alone.

    Raises ValueError for a speed-up beyond what the batch sizes allow without any sum.
    """
    host, node = network.host, network.node
    global_batch = host.batch_size + num_nodes * node.batch_size
    sum_s = global_batch / (speedup * host.samples_per_s) - max(host.step_s, node.step_s)
    if sum_s < 0:
        raise ValueError(f"{num_nodes} nodes cannot bring {speedup} times the host alone")
    return RingCost(sum_s / (ring_share(num_nodes + 1) * network.gradient_bytes))


def fit_newport_power(energies: Sequence[PublishedEnergy] = TABLE_2, ring: RingCost | None = None) -> Power:
    """The pair of powers of the server with Newports, and the power of the one with ordinary SSDs.

    Fitted to the columns with Newports; the one without is another machine, and its own figure.
    """
    network = TABLE_1[Network.MOBILENETV2]
    with_nodes = [energy for energy in energies if energy.num_nodes]
    curve = predict_published(network, max(energy.num_nodes for energy in energies), ring or fit_ring())
    pair = fit_power(
        [energy.num_nodes for energy in with_nodes],
        [energy.joules_per_image for energy in with_nodes],
        [curve[energy.num_nodes].samples_per_s for energy in with_nodes],
    )
    ordinary = next((energy for energy in energies if not energy.num_nodes), None)
    if ordinary is None:
        return pair
    return Power(pair.host_w, pair.node_w, ordinary.joules_per_image * network.host_samples_per_s)


def predict_published(
    network: PublishedNetwork, max_nodes: int, ring: RingCost, power: Power | None = None
) -> list[CurvePoint]:
    """The curve of one of the paper's networks over 0 to `max_nodes` Newports."""
    return predict_curve(
        network.host, [network.node], max_nodes, ring, gradient_bytes=network.gradient_bytes, power=power
    )
