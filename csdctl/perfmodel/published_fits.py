"""What the paper's figures imply but do not print: the sum over the ranks, and a pair of powers; pure.

Two things are fitted. The seconds per byte of Horovod's ring come from the one speed-up in the text (2.7 with
24 CSDs); the pair of powers comes from the energy row of Table II. Batch sizes and speeds are those of Table
I. The limits of this: docs/explanation/the-papers-figures.md.
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
    """Fit the ring with which `num_nodes` Newports reach `speedup` over the host alone.

    Raises ValueError for a speed-up that the batch sizes do not allow even without a sum.
    """
    host, node = network.host, network.node
    global_batch = host.batch_size + num_nodes * node.batch_size
    sum_s = global_batch / (speedup * host.samples_per_s) - max(host.step_s, node.step_s)
    if sum_s < 0:
        raise ValueError(f"{num_nodes} nodes cannot reach {speedup} times the host alone")
    return RingCost(sum_s / (ring_share(num_nodes + 1) * network.gradient_bytes))


def fit_newport_power(energies: Sequence[PublishedEnergy] = TABLE_2, ring: RingCost | None = None) -> Power:
    """Fit the pair of powers of the server with Newports; the power without them is that of another server.

    Fitted to the columns with Newports. The column without is a machine with ordinary SSDs.
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
    """Predict the curve of one of the paper's networks over 0 to `max_nodes` Newports."""
    return predict_curve(
        network.host, [network.node], max_nodes, ring, gradient_bytes=network.gradient_bytes, power=power
    )
