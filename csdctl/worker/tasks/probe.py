"""Measures a step in a process of its own, beside the rank of a machine that has other settings."""

from typing import Any, cast

from csdctl.worker.protocol.probe import ProbeResult, ProbeSpec
from csdctl.worker.tasks.progress import Reporter, RunProgress
from csdctl.worker.tasks.task import Orders, TaskContext
from csdctl.worker.tasks.trial import Trial


def probe(spec: ProbeSpec, **_: Any) -> ProbeResult:
    """Return what was measured. Raises WorkerError."""
    run, me = spec.run, spec.run.ranks[spec.rank]
    no_orders = cast(Orders, None)
    trial = Trial(TaskContext(run, me, RunProgress(run), Reporter(me), no_orders))
    trial.load()
    return trial.measure(spec.request)
