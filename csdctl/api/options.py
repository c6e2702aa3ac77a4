"""Options of workflows as Python has them: errors name arguments, not options of the command line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from csdctl.errors import CsdctlError
from csdctl.workflows.train import options as of_train
from csdctl.workflows.tune import options as of_tune

ARGUMENTS = {
    "--batch-sizes": "batch_sizes",
    "--checkpoint-seconds": "checkpoint_interval_s",
    "--feature-engine": "features.engine",
    "--feature-precision": "features.precision",
    "--global-batch": "limits.global_batch",
    "--keep": "num_checkpoints",
    "--max-global-batch": "limits.max_global_batch",
    "--micro-batches": "num_micro_batches",
    "--no-host": "is_host_training=False",
    "--silence-timeout": "deadlines.silence_s",
    "--start-timeout": "deadlines.start_s",
    "--probe-seconds": "probe_duration_s",
}
"""Arguments in Python by the option of the command line, where the name is another one."""


@contextmanager
def python_errors() -> Iterator[None]:
    """Let errors name arguments in Python; command lines in backquotes stay as they are."""
    try:
        yield
    except CsdctlError as error:
        error.message, error.remedy = _in_python(error.message), _in_python(error.remedy)
        raise


def _in_python(text: str) -> str:
    def rename(found: re.Match[str]) -> str:
        option = found[0]
        if not option.startswith("--"):
            return option
        return ARGUMENTS.get(option, option.removeprefix("--").replace("-", "_"))

    return re.sub(r"`[^`]*`|csdctl [a-z]+[^;,]*|(?<![\w-])--[a-z][a-z-]*", rename, text)


class TrainOptions(of_train.TrainOptions):
    """Options of one run; raises InputError for invalid values."""

    def __post_init__(self) -> None:
        with python_errors():
            super().__post_init__()


class TuneOptions(of_tune.TuneOptions):
    """The method, the limits of a plan, and how to measure; raises InputError for invalid values."""

    def __post_init__(self) -> None:
        with python_errors():
            super().__post_init__()
