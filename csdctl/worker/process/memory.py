"""Memory of this process."""

import resource


def peak_memory_bytes() -> int:
    """Return the peak resident set size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
