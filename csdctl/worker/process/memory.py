"""The memory of this process."""

import resource


def peak_memory_bytes() -> int:
    """The largest resident size this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
