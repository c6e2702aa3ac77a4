"""The kernel's counters of real connections over the loopback."""

import contextlib
import socket
import threading

from csdctl.worker.protocol.processes import list_connections


def test_bytes_on_their_way_are_counted_when_they_have_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sender:
        sender.connect(server.getsockname())
        receiver, _ = server.accept()
        with receiver:
            sender.setblocking(False)
            num_written = 0
            with contextlib.suppress(BlockingIOError):
                while True:  # until the buffers of both sides are full
                    num_written += sender.send(bytes(1 << 16))
            own = "{} {}".format(*sender.getsockname())

            def num_sent(drain_s: float) -> int:
                return next(one.num_sent for one in list_connections(drain_s=drain_s) if one.local == own)

            assert num_sent(0) < num_written

            def read() -> None:
                left = num_written
                while left:
                    left -= len(receiver.recv(1 << 16))

            reading = threading.Timer(0.1, read)
            reading.start()
            assert num_sent(3600) == num_written + 1  # the kernel counts the SYN
            reading.join()
