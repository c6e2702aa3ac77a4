"""The node's memory limit: processes that exceed it are killed, as by the kernel's OOM killer."""

import asyncio
import logging
import os
import signal

from csdctl.emulation.processes import anonymous_bytes, list_descendants, process_name, send_signal

INTERVAL_S = 0.25

log = logging.getLogger(__name__)


async def watch_memory(limit_bytes: int) -> None:
    """Limit the descendants of this process to `limit_bytes` of anonymous memory; never returns."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        end_largest_above(limit_bytes, {pid: anonymous_bytes(pid) for pid in list_descendants(os.getpid())})


def end_largest_above(limit_bytes: int, used_bytes: dict[int, int]) -> int | None:
    """If the processes exceed the limit together, kill the largest and return its pid."""
    total_bytes = sum(used_bytes.values())
    if total_bytes <= limit_bytes:
        return None
    largest = max(used_bytes, key=lambda pid: used_bytes[pid])
    log.warning(
        "out of memory: killed %s (pid %d, %d MiB); the node uses %d of %d MiB",
        process_name(largest),
        largest,
        used_bytes[largest] >> 20,
        total_bytes >> 20,
        limit_bytes >> 20,
    )
    send_signal([largest], signal.SIGKILL)
    return largest
