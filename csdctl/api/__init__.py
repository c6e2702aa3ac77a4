"""The Python interface: the workflows of the command line, for scripts and notebooks."""

from csdctl.api.job import Job
from csdctl.api.run import Run, train, tune
from csdctl.fleet.model import Fleet
from csdctl.tuning.plan import Plan

__all__ = ["Fleet", "Job", "Plan", "Run", "train", "tune"]
