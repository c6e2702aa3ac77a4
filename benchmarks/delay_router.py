"""Connect the namespaces NAME and NAME-far by two TUN devices and delay every packet by DELAY seconds.

usage: delay_router.py NAME DELAY; prints a line when the route is ready, and runs until it is stopped.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 1 << 16


def open_tun(namespace: str, device: str) -> int:
    """Return a TUN device in `namespace`; closing removes it."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    run("ip", "link", "set", device, "netns", namespace)
    run("ip", "-n", namespace, "link", "set", device, "txqueuelen", "20000", "up")
    return tun


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def forward(tuns: tuple[int, int], delay_s: float) -> None:
    """Read packets from each device and write them to the other when they are due."""
    queues: dict[int, deque[tuple[float, bytes]]] = {tun: deque() for tun in tuns}
    while True:
        due_s = min((queue[0][0] for queue in queues.values() if queue), default=None)
        wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        readable, _, _ = select.select(tuns, [], [], wait_s)
        for tun in readable:
            other = tuns[1] if tun == tuns[0] else tuns[0]
            try:
                while True:
                    queues[other].append((time.monotonic() + delay_s, os.read(tun, MAX_PACKET_BYTES)))
            except BlockingIOError:
                pass
        now_s = time.monotonic()
        for tun, queue in queues.items():
            while queue and queue[0][0] <= now_s:
                os.write(tun, queue.popleft()[1])


def main() -> None:
    namespace, delay_s = sys.argv[1], float(sys.argv[2])
    tuns = open_tun(namespace, "csdb-near"), open_tun(f"{namespace}-far", "csdb-far")
    run("ip", "-n", namespace, "route", "add", "10.78.0.0/16", "dev", "csdb-near")
    run("ip", "-n", f"{namespace}-far", "addr", "add", "10.78.0.1/16", "dev", "csdb-far")
    run("ip", "-n", f"{namespace}-far", "route", "add", "10.77.0.0/16", "dev", "csdb-far")
    print("ready", flush=True)
    forward(tuns, delay_s)


if __name__ == "__main__":
    main()
