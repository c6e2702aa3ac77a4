"""csdctl trains one Keras model over a host and its computational storage devices.

In Python and in notebooks:

    job = csdctl.Job.from_model(model, (x, y), epochs=5)
    run = csdctl.train(job, "fleet.yaml")
    run.history["loss"], run.model(), run.report()
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "STOP",
    "CsdctlError",
    "EarlyStopping",
    "Fleet",
    "Job",
    "Limits",
    "Patience",
    "Plan",
    "ReduceOnPlateau",
    "Run",
    "RunStopped",
    "TrainOptions",
    "TuneOptions",
    "__version__",
    "discover",
    "load_fleet",
    "load_run",
    "prepare",
    "train",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is used: the command line and the workers start without it."""
    if name == "errors":
        return import_module("csdctl.errors")
    if name not in __all__:
        raise AttributeError(f"module 'csdctl' has no attribute {name!r}")
    return getattr(import_module("csdctl.api.interface"), name)


def __dir__() -> list[str]:
    """Return the public names, for completion in notebooks."""
    return sorted([*__all__, "errors"])
