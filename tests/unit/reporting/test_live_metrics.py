"""Figures that Prometheus would read over HTTP."""

import socket
import urllib.request
from dataclasses import asdict

import pytest

from csdctl.errors import CsdctlError, ExitCode, InputError
from csdctl.reporting.live_metrics import serve_metrics
from csdctl.worker.protocol.events import Event, Joined, NodeLost, Progress, Ready, WaitingFor


def document(event: Event) -> dict[str, object]:
    return {"run": "run-1", "time": 1.0, "event": type(event).__name__, **asdict(event)}


def test_figures_add_up_and_are_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    update = serve_metrics(str(port))
    update(document(Ready(2, "csd1", 100)))
    update(document(Joined(0, "host", 1, 0, 9, 0, {"0": 64, "1": 8, "2": 8}, is_start=True)))
    update(document(WaitingFor(0, "host", ("csd0",))))
    for _ in range(2):
        update(document(Progress(1, "csd0", 3, 7, 1, 8, 0.5, 0.25, 1.0)))
    update(document(Progress(0, "host", 3, 7, 1, 64, 0.5, 0.25, 1.0, 72, 0.125)))
    update(document(NodeLost(1, "csd0", "no answer")))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    for line in (
        'csdctl_samples_total{node="csd0"} 16.0',
        'csdctl_wait_seconds_total{node="csd0"} 0.5',
        'csdctl_rank_losses_total{node="csd0"} 1.0',
        'csdctl_rank_losses_total{node="csd1"} 0.0',
        'csdctl_batch_size{rank="2"} 8.0',
        "csdctl_loss 0.125",
        "csdctl_epoch 3.0",
        'csdctl_run_info{run="run-1"} 1.0',
    ):
        assert line in text.splitlines()
    assert "csdctl_accuracy" not in text  # not known yet
    with pytest.raises(CsdctlError, match="cannot serve metrics") as raised:
        serve_metrics(str(port))
    assert raised.value.exit_code == ExitCode.FAILED


@pytest.mark.parametrize("address", ["", "x", "0", "70000", "host:"])
def test_address_is_checked(address: str) -> None:
    with pytest.raises(InputError, match="expected PORT or HOST:PORT"):
        serve_metrics(address)
