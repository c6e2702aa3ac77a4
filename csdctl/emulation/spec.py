"""The specification of an emulated fleet: number of nodes, and CPU and memory of each."""

import os
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from csdctl.errors import InputError

MAX_NODES = 64
MIN_CPU = 0.01
"""Minimum share, in cores: below it a node takes seconds to respond."""
MIN_MEMORY_BYTES = 16 << 20
CPU_MECHANISMS = ("auto", "cgroup", "duty")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class EmulatedSpec:
    """An emulated fleet: `cpu` in cores and `memory_bytes` apply to each node."""

    num_nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    cpu: float = 0.25
    memory_bytes: int = 2 << 30


def check_spec(spec: EmulatedSpec) -> None:
    """Raise InputError for a fleet that this machine cannot emulate."""
    num_cores = os.cpu_count() or 1
    if not 1 <= spec.num_nodes <= MAX_NODES:
        raise InputError(f"received {spec.num_nodes} nodes, expected 1 to {MAX_NODES}")
    if not MIN_CPU <= spec.cpu <= num_cores:
        raise InputError(
            f"received {spec.cpu:g} cores for each node, expected {MIN_CPU} to {num_cores}, "
            "the number of cores of this machine"
        )
    if spec.memory_bytes < MIN_MEMORY_BYTES:
        raise InputError(
            f"received {spec.memory_bytes} bytes of memory for each node, "
            f"expected at least {MIN_MEMORY_BYTES >> 20}M"
        )


def parse_size(text: str) -> int:
    """Parse `2G`, `512M` or `1.5GiB` as bytes (K, M, G and T are powers of 1024); raises InputError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise InputError(f"received {text!r} as a size, expected a number and a unit such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])
