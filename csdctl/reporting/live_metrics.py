"""Figures of a run while it trains, served over HTTP for Prometheus (https://prometheus.io)."""

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.requirements import explain_extra
from csdctl.reporting.tally import Amounts, Tally
from csdctl.worker.protocol.events import event_from_document

COUNTED = ("Joined", "Progress", "EpochEnd")
"""Events from which the tally takes steps and samples."""


def serve_metrics(address: str) -> Callable[[dict[str, Any]], None]:
    """Serve /metrics at [HOST:]PORT, by default only for this machine. Return the callback of events.

    Raises InputError if the package is missing or the address is wrong, CsdctlError if it is in use.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise InputError(
            "--metrics needs the package prometheus-client", remedy=explain_extra("metrics")
        ) from None
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"received --metrics {address!r}", remedy="expected PORT or HOST:PORT")
    registry = CollectorRegistry()
    try:
        start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except OSError as error:
        kind = CsdctlError if error.errno == errno.EADDRINUSE else InputError  # it may be free later
        problem = f"cannot serve metrics at {address}: {error.strerror}"
        raise kind(problem, remedy="use another port") from error
    return _Figures(registry)


class _Figures:
    def __init__(self, registry: Any) -> None:
        from prometheus_client import Counter, Gauge, Info

        def counter(name: str, text: str) -> Any:
            return Counter(f"csdctl_{name}", text, ["node"], registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return Gauge(f"csdctl_{name}", text, labels, registry=registry if labels else None)

        self._tally, self._registry = Tally(), registry
        self._run = Info("csdctl_run", "The run.", registry=None)
        self._samples = counter("samples", "Samples that the rank of a node has trained on.")
        self._seconds = {
            "compute_s": counter("compute_seconds", "Seconds in which the rank computed."),
            "wait_s": counter("wait_seconds", "Seconds in which the rank waited or communicated."),
            "cpu_s": counter("cpu_seconds", "CPU seconds of the rank's process."),
        }
        self._losses = counter("rank_losses", "Times that the rank was lost.")
        self._memory = gauge("memory_bytes", "Memory of the rank's process.", ("node",))
        self._batch_size = gauge("batch_size", "Batch size of the rank with this number.", ("rank",))
        progress = {
            "epoch": "Current epoch, from 1.",
            "step": "Current step of the epoch.",
            "loss": "Training loss over all ranks.",
            "accuracy": "Training accuracy over all ranks.",
            "validation_loss": "Validation loss after the last epoch.",
            "validation_accuracy": "Validation accuracy after the last epoch.",
            "learning_rate": "Learning rate.",
        }
        self._progress = {name: gauge(name, text) for name, text in progress.items()}

    def __call__(self, event: dict[str, Any]) -> None:
        self._run.info({"run": event["run"]})
        self._serve(self._run)
        kind, is_first = event["event"], event["rank"] == 0
        if kind in COUNTED:  # no other event has steps
            content = {name: event[name] for name in event if name not in ("run", "time")}
            # As parsed JSON, which has lists in the place of tuples.
            if report := self._tally.add(event_from_document(json.loads(json.dumps(content)))):
                self._add_report(event, report)
        if kind == "NodeLost":
            self._losses.labels(event["node"]).inc()
        elif kind == "Ready":
            self._losses.labels(event["node"])  # 0 from the start, so that a loss is an increase
        if kind in ("Joined", "Rebalanced") and is_first:
            self._batch_size.clear()  # of ranks that were lost
            for rank, size in event["batch_sizes"].items():
                self._batch_size.labels(rank).set(size)
        if is_first and kind in COUNTED:
            for name, gauge in self._progress.items():
                if event.get(name) is not None:
                    gauge.set(event[name])
                    self._serve(gauge)

    def _serve(self, metric: Any) -> None:
        """Serve `metric` from now on: before it has a value, it would be 0, or without its label."""
        with suppress(ValueError):  # it is served already
            self._registry.register(metric)

    def _add_report(self, event: dict[str, Any], report: Amounts) -> None:
        node = event["node"]
        self._samples.labels(node).inc(report.samples)
        for name, counter in self._seconds.items():
            counter.labels(node).inc(getattr(report, name) or 0.0)
        if event.get("memory_bytes") is not None:
            self._memory.labels(node).set(event["memory_bytes"])
