"""Answers of a management controller that are no HTTP."""

import socket
import threading

import pytest

from csdctl.energy.sources import read_redfish
from csdctl.fleet.model import PowerSource
from tests.patience import scaled


def answer_once(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    ],
    ids=["no status line", "cut off", "too many headers"],
)
def test_damaged_http_answer_is_a_value_error(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        controller = threading.Thread(target=answer_once, args=(server, answer))
        controller.start()
        power = PowerSource(
            source="redfish", url=f"http://127.0.0.1:{server.getsockname()[1]}/redfish/v1/Chassis/1"
        )
        with pytest.raises(ValueError, match="expected an HTTP answer, received a damaged one"):
            read_redfish(power, deadline_s=scaled(10))
        controller.join()
