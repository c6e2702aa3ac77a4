"""NVIDIA GPUs: `nvidia-smi --query-gpu=index,power.draw --format=csv`.

These are the watts of the boards, without the machine that they are in.
"""

from csdctl.energy.reading import Reading, parse_watts

SCRIPT = "nvidia-smi --query-gpu=index,power.draw --format=csv,noheader,nounits 2>&1"
REMEDY = "run `nvidia-smi --query-gpu=index,power.draw --format=csv` there"


def parse_nvidia_smi(output: str) -> Reading:
    """Return the sum over all GPUs, with or without a header and units; raises ValueError."""
    watts: list[float] = []
    for line in filter(str.strip, output.splitlines()):
        index, comma, power = line.rpartition(",")
        if index.strip() == "index":
            continue
        if not comma or not index.strip().isdigit():
            raise ValueError(f"expected the index and power of a GPU, received {line[:100]!r}")
        watts.append(parse_watts(power.strip().removesuffix(" W"), f"the watts of GPU {index.strip()}"))
    if not watts:
        raise ValueError("nvidia-smi lists no GPU")
    return Reading(sum(watts))
