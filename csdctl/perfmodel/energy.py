"""Energy per sample from two powers and a rate, and the two powers from energies; pure.

energy per sample = (host power + number of nodes × node power) / samples per second
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Power:
    """Watts of a server with nodes that train, all at least 0."""

    host_w: float
    """Independent of the number of nodes that train: the busy host and the rest of its chassis."""
    node_w: float
    """Added by each node that trains."""
    without_nodes_w: float | None = None
    """The busy host alone, where that is another machine: with ordinary drives instead of nodes."""

    def __post_init__(self) -> None:
        if min(self.host_w, self.node_w, self.without_nodes_w or 0.0) < 0:
            raise ValueError(f"a power cannot be negative: {self}")

    def at(self, num_nodes: int, num_idle: int = 0) -> float:
        """Return the watts of a server with `num_nodes` nodes, of which `num_idle` do not train."""
        if num_nodes == 0 and self.without_nodes_w is not None:
            return self.without_nodes_w
        return self.host_w + (num_nodes - num_idle) * self.node_w


def fit_power(
    num_nodes: Sequence[int], joules_per_sample: Sequence[float], samples_per_s: Sequence[float]
) -> Power:
    """Fit host and node power by least squares of relative errors in energy per sample.

    The three sequences have one element per measured energy. A node power below 0 becomes 0, and the host's
    is fitted again. Raises ValueError with fewer than two different numbers of nodes.
    """
    if len(set(num_nodes)) < 2:
        raise ValueError("a pair of powers needs energies at two different numbers of nodes")
    # (host + n · node) / (energy · rate) should be 1: host_weight · host + node_weight · node = 1.
    host_weights = [
        1 / (energy * rate) for energy, rate in zip(joules_per_sample, samples_per_s, strict=True)
    ]
    node_weights = [count * weight for count, weight in zip(num_nodes, host_weights, strict=True)]
    host_host = sum(weight * weight for weight in host_weights)
    node_node = sum(weight * weight for weight in node_weights)
    host_node = sum(host * node for host, node in zip(host_weights, node_weights, strict=True))
    host_sum, node_sum = sum(host_weights), sum(node_weights)
    determinant = host_host * node_node - host_node * host_node
    node_w = (node_sum * host_host - host_sum * host_node) / determinant
    if node_w < 0:
        return Power(host_sum / host_host, 0.0)
    return Power((host_sum * node_node - node_sum * host_node) / determinant, node_w)
