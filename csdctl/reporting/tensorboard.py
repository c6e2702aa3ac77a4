"""A run as an event file of TensorBoard, written by tensorboardX: TensorFlow is not loaded."""

from pathlib import Path

from csdctl.errors import InputError
from csdctl.reporting.results import RunResults
from csdctl.reporting.scalars import parameters_of, scalars_of

MISSING = "TensorBoard's event files need tensorboardX"
REMEDY = "pip install 'csdctl[tensorboard]'; `--to csv` needs nothing"


def write_tensorboard(run: RunResults, directory: Path) -> None:
    """Write a run to a new event file in `directory`; raises InputError without tensorboardX."""
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise InputError(MISSING, remedy=REMEDY) from error
    with SummaryWriter(str(directory)) as writer:
        rows = "\n".join(f"{name}: {value}" for name, value in parameters_of(run).items())
        writer.add_text("parameters", f"```\n{rows}\n```", 0, walltime=run.series.start_s)
        for scalar in scalars_of(run):
            writer.add_scalar(scalar.name, scalar.value, scalar.step, walltime=scalar.time_s)
