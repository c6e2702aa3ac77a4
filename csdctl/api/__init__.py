"""The Python interface: the workflows of the command line, for scripts and notebooks."""

from csdctl.api.fleet import Fleet, load_fleet
from csdctl.api.job import Job
from csdctl.api.options import TrainOptions, TuneOptions
from csdctl.api.run import Run, discover, load_run, prepare, train, tune, verify
from csdctl.errors import CsdctlError
from csdctl.supervision.event_callbacks import STOP
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.recipe import EarlyStopping, ReduceOnPlateau
from csdctl.workflows.train.run import RunStopped

__all__ = [
    "STOP",
    "CsdctlError",
    "EarlyStopping",
    "Fleet",
    "Job",
    "Plan",
    "ReduceOnPlateau",
    "Run",
    "RunStopped",
    "TrainOptions",
    "TuneOptions",
    "discover",
    "load_fleet",
    "load_run",
    "prepare",
    "train",
    "tune",
    "verify",
]
